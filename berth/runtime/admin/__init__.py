"""The admin port of every process: `/livez`, `/readyz`, `/metrics` and pages of its own, from a thread of its own.

Requests are not authenticated, so everything here is bounded: connections, heads,
time, what is kept for those that do not read, the thread's share of the processor, and what is asked of the
process's own loop. Nothing here imports what is heavy: it is on every pod's bill.
"""

from berth.runtime.admin.http import Reply, Request
from berth.runtime.admin.pages import Answer, CachedPage, Format, Page
from berth.runtime.admin.server import AdminServer

__all__ = ["AdminServer", "Answer", "CachedPage", "Format", "Page", "Reply", "Request"]

"""Files that took a Triton down, and the pods that would bring them to the next. Pure.

An agent quarantines by content, on its own node's disk: another node would learn of it by its own Triton's
death. A binder sees no content; it takes the pods of one template of one controller for bringers of the same
files. Once a node reports one of them as quarantined, none is placed afresh, on any node; what serves stays.

That ends when the node lifts it (the same pod's model is loaded after all, or the node's annotation says so),
or after QUARANTINE_SECONDS where the pod that told of it is gone, or with the template: another one has another
key. A row that only says that files are there says nothing: so does an agent that has just started. A binder that starts anew learns it from the reports, and from what it said itself in the conditions of
the pods that wait.
"""

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from berth.contract.ids import NodeName, PodUid
from berth.contract.report import Failure, ModelReport, ModelState, NodeReport
from berth.kube.times import parse_time, rfc3339, utc_now

# As long as an agent's own.
QUARANTINE_SECONDS = 24 * 3600.0
_MOST_TEMPLATES = 4096
_SAID = re.compile(r"took Triton down on node (\S+); none is placed until (\S+?Z)\b")
# Which an agent says of no files that it holds for bad.
_LOADED = (ModelState.LOADING, ModelState.READY)
# Of a digest; what an operator writes has that many characters at least.
_BEGINNING = 8

# Namespace, the controller's uid, and its template's hash, "" where it has only one template.
Template = tuple[str, str, str]
TemplateOf = Callable[[PodUid], Template | None]


def template_of(namespace: str, owner: str | None, labels: Mapping[str, Any]) -> Template | None:
    """What a pod has in common with those that bring the same files; None for a pod on its own."""
    revision = labels.get("pod-template-hash") or labels.get("controller-revision-hash") or ""
    return None if owner is None else (namespace, owner, str(revision))


@dataclass(slots=True)
class _Entry:
    """Of one node. `pod`: which one it was, if that is known; `is_listed`: the node's report says so still."""

    pod: PodUid | None
    until: datetime
    reason: str
    is_listed: bool
    annotation: str


class Quarantines:
    """By template and node. `follow` takes reports, `remember` what was said before."""

    def __init__(self, now: Callable[[], datetime] = utc_now) -> None:
        self._now = now
        self._known: dict[Template, dict[NodeName, _Entry]] = {}
        self._at: dict[NodeName, set[Template]] = {}
        # Until when what has been lifted would have held: conditions that say so still are of that one.
        self._lifted: OrderedDict[Template, datetime] = OrderedDict()

    def __len__(self) -> int:
        """How many templates are not placed."""
        return sum(self._entry(template) is not None for template in list(self._known))

    def follow(self, node: NodeName, report: NodeReport | None, lifted: str, template: TemplateOf) -> None:
        """Take a node's report. `lifted`: what its annotation says of quarantines that end."""
        models = () if report is None else report.models
        bad = [model for model in models if model.failure is Failure.QUARANTINED]
        if not bad and node not in self._at:
            return
        rows = {model.pod_uid: model for model in models}
        loaded = {template(model.pod_uid) for model in models if model.state in _LOADED}
        for known in list(self._at.get(node, ())):
            self._renew(known, node, rows, loaded, lifted)
        for model in bad:
            if (key := template(model.pod_uid)) is not None:
                self._note(key, node, model, lifted)

    def remember(self, template: Template | None, message: str) -> NodeName | None:
        """What a waiting pod's condition says, perhaps an earlier binder's word. Returns the node of which it
        was not known yet: its report is to be followed, for it may say by now that this is over."""
        found = None if template is None or template in self._known else _SAID.search(message)
        until = None if found is None else parse_time(found[2])
        if template is None or found is None or until is None or until <= self._now():
            return None
        if template in self._lifted and until <= self._lifted[template]:
            return None
        longest = self._now() + timedelta(seconds=QUARANTINE_SECONDS)
        self._put(template, NodeName(found[1]), _Entry(None, min(until, longest), "", False, ""))
        return NodeName(found[1])

    def because(self, template: Template | None) -> str:
        """Why no pod of the template is placed; "" where nothing is known against it."""
        found = None if template is None else self._entry(template)
        if found is None:
            return ""
        node, entry = found
        return (
            f"the files of this pod took Triton down on node {node}; none is placed until"
            f" {rfc3339(entry.until)}, unless the quarantine on that node is lifted or the pods' template changes"
        )

    def _renew(
        self,
        key: Template,
        node: NodeName,
        rows: Mapping[PodUid, ModelReport],
        loaded: Set[Template | None],
        lifted: str,
    ) -> None:
        entry = self._known[key][node]
        row = None if entry.pod is None else rows.get(entry.pod)
        entry.is_listed = row is not None and row.failure is Failure.QUARANTINED
        is_loaded = key in loaded if entry.pod is None else row is not None and row.state in _LOADED
        says_so = not entry.is_listed and lifted != entry.annotation and _lifts(lifted, entry.reason)
        if is_loaded or says_so:
            self._lift(key, node, entry)

    def _lift(self, key: Template, node: NodeName, entry: _Entry) -> None:
        self._drop(key, node)
        self._lifted[key] = max(entry.until, self._lifted.pop(key, entry.until))
        if len(self._lifted) > _MOST_TEMPLATES:
            self._lifted.popitem(last=False)

    def _note(self, key: Template, node: NodeName, model: ModelReport, lifted: str) -> None:
        known = self._known.get(key, {}).get(node)
        until = self._now() + timedelta(seconds=QUARANTINE_SECONDS) if known is None else known.until
        # A report that had no room for the reason has told it before.
        reason = model.reason or ("" if known is None else known.reason)
        self._put(key, node, _Entry(model.pod_uid, until, reason, True, lifted))

    def _put(self, key: Template, node: NodeName, entry: _Entry) -> None:
        self._known.setdefault(key, {})[node] = entry
        self._at.setdefault(node, set()).add(key)
        while len(self._known) > _MOST_TEMPLATES:
            # Of the namespace that has the most, so that nobody's pushes out another's: the first noted.
            namespace, _ = Counter(one[0] for one in self._known).most_common(1)[0]
            oldest = next(one for one in self._known if one[0] == namespace)
            for place in list(self._known[oldest]):
                self._drop(oldest, place)

    def _entry(self, key: Template) -> tuple[NodeName, _Entry] | None:
        """One that holds; those whose time is over are forgotten."""
        now = self._now()
        for node, entry in list(self._known.get(key, {}).items()):
            if entry.is_listed or now < entry.until:
                return node, entry
            self._drop(key, node)
        return None

    def _drop(self, key: Template, node: NodeName) -> None:
        for index, one, other in ((self._known, key, node), (self._at, node, key)):
            _discard(index, one, other)


def _discard(index: Any, key: Any, value: Any) -> None:
    inner = index[key]
    inner.pop(value) if isinstance(inner, dict) else inner.discard(value)
    if not inner:
        del index[key]


def _lifts(annotation: str, reason: str) -> bool:
    """Whether a node's annotation names what a reason tells of: `all`, or the digest's beginning."""
    entries = [entry.strip().lower() for entry in annotation.split(",")]
    return "all" in entries or any(
        len(one) >= _BEGINNING and one[:_BEGINNING] in reason.lower() for one in entries
    )

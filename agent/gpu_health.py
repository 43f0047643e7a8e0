"""When a GPU is broken, from NVML's facts. Pure.

XIDs are the driver's error reports. Most of them are an application's: a tenant's kernel that reads where
it may not makes a 13 or a 31, and breaks no GPU for others. Critical are those for which NVIDIA's Xid
Catalog (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html) wants the GPU reset or the machine
restarted at once (RESET_GPU, RESTART_BM, and the workflows of 48 and 74, which end in one), and 94: its
error is contained to one process, and Triton is the process of every model on the GPU. NVIDIA's own
device plugin (k8s-device-plugin, internal/rm/health.go) ignores 13, 31, 43, 45, 68 and 109 and takes every
other XID for critical; the catalogue knows more that an application can cause (8, 11, 32, ...) and more
that need no action (63, 92, 121, ...), and a tenant must not be able to take a GPU from the others.
"""

from dataclasses import dataclass

CRITICAL_XIDS = {
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    64: "failure to remap a row or to retire a page",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "no answer from the GPU's system processor",
    120: "error of the GPU's system processor",
    140: "unrecovered ECC error",
}


@dataclass(frozen=True, slots=True)
class Health:
    """A GPU's report of its faults since its last reset. A fact that it does not report (consumer cards do not)
    is no fault. `xid`: the first critical one; `ecc_errors`: uncorrected ones.

    Errors from before the last reset do not count: rows and pages that were bad have been replaced since.
    """

    xid: int | None = None
    ecc_errors: int | None = None
    remap_pending: bool = False
    remap_failed: bool = False
    retirement_pending: bool = False

    @property
    def fault(self) -> str:
        """What is broken, and what mends it; "" where nothing is."""
        if self.xid is not None:
            what = CRITICAL_XIDS.get(self.xid, "")
            return f"XID {self.xid}{f' ({what})' if what else ''}: the GPU must be reset"
        if self.remap_failed:
            return "RowRemapFailure: a bad row of its memory could not be replaced: the GPU must be exchanged"
        if self.ecc_errors:
            return f"ECC: {self.ecc_errors} uncorrected memory errors since its last reset: the GPU must be reset"
        if self.remap_pending:
            return "RowRemapPending: a bad row of its memory is replaced when the GPU is reset"
        if self.retirement_pending:
            return "PageRetirementPending: a bad page of its memory is retired when the GPU is reset"
        return ""

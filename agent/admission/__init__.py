"""What may be loaded: one allow-list, from a tenant's files to a configuration that Berth writes.

    rules = NodeRules(capabilities=…, code=…)
    admitted = admit(directory, name, rules)        # blocks; raises InvalidModel, CodeRefused or OSError
    gate.claim(uid, namespace, has_code=admitted.has_code)                # raises CodeRefused
    triton.load(name, admitted.for_gpus(ordinals, kind=…))  # no text of the tenant's reaches Triton
    gate.release(uid)                               # when Triton's index shows it gone

`judge` is `admit` without the disk: for a list of files and the text of config.pbtxt that a loader has
sent before the weights.
"""

from agent.admission.admit import Admission, Admitted, NodeRules, admit, judge, write_anew
from agent.admission.code_gate import CodeGate
from agent.admission.errors import CodeRefused, InvalidModel
from agent.admission.files import CONFIG_FILE, ModelFiles

__all__ = [
    "CONFIG_FILE",
    "Admission",
    "Admitted",
    "CodeGate",
    "CodeRefused",
    "InvalidModel",
    "ModelFiles",
    "NodeRules",
    "admit",
    "judge",
    "write_anew",
]

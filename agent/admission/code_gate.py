"""Whose code runs in this node's Triton, and whose models may be loaded beside it.

Code in Triton's process or container can read and change every model there, so under the rule
`namespace` a Triton that holds a model with code holds models of that one namespace. Synchronous: the
decision and its claim are one step, so that of two loads at once not both pass.
"""

from dataclasses import dataclass

from agent.admission.errors import CodeRefused
from berth.contract.ids import PodUid
from berth.contract.report import CodeReport, CodeRule


@dataclass(frozen=True, slots=True)
class _Holder:
    namespace: str
    has_code: bool


class CodeGate:
    """Knows every model that Triton holds or is about to.

    `claim` before Triton is asked; `hold` what an agent finds at its start, whatever the rule says of it;
    `release` when Triton's index shows the model gone; `note_unowned` when that index shows a model without a
    record. Each call may be repeated.
    """

    def __init__(self, rule: CodeRule) -> None:
        self.rule = rule
        self._holders: dict[PodUid, _Holder] = {}
        self._has_unowned = False

    def check(self, uid: PodUid, namespace: str, *, has_code: bool) -> None:
        """Raises CodeRefused if this model could not be loaded now. The message does not name the owners of other models."""
        if has_code and self.rule is CodeRule.NONE:
            raise CodeRefused("the model has code, and this node takes none (--code none)")
        if self.rule is not CodeRule.NAMESPACE:
            return
        if self._has_unowned:
            raise CodeRefused(
                "this node's Triton holds a model whose owner is unknown and which may be code; "
                "it is being unloaded"
            )
        others = [one for other, one in self._holders.items() if other != uid and one.namespace != namespace]
        if any(one.has_code for one in others):
            raise CodeRefused(
                "this node holds a model with code of another namespace, and takes models of that one only"
            )
        if has_code and others:
            raise CodeRefused("the model has code, and this node holds models of other namespaces")

    def claim(self, uid: PodUid, namespace: str, *, has_code: bool) -> None:
        """Count the model among those that Triton holds, from now on. Raises CodeRefused."""
        self.check(uid, namespace, has_code=has_code)
        self.hold(uid, namespace, has_code=has_code)

    def hold(self, uid: PodUid, namespace: str, *, has_code: bool) -> None:
        """Count a model that Triton may hold already."""
        self._holders[uid] = _Holder(namespace, has_code)

    def release(self, uid: PodUid) -> None:
        """Triton holds the model no more."""
        self._holders.pop(uid, None)

    def counts(self, uid: PodUid) -> bool:
        """Whether the model of this pod is among those that Triton holds, or may."""
        return uid in self._holders

    def note_unowned(self, *, loaded: bool) -> None:
        """Whether Triton holds a model without an owner: until it is unloaded it counts as any tenant's code."""
        self._has_unowned = loaded

    def report(self) -> CodeReport:
        """What the node's report says of it."""
        namespaces = sorted({one.namespace for one in self._holders.values() if one.has_code})
        return CodeReport(self.rule, namespaces[0] if namespaces else None)

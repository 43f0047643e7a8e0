"""Files that took a Triton down, and the pods that would bring them to the next. Pure.

An agent quarantines by content, on its own node's disk: another node would learn of it by its own Triton's
death. A binder sees no content; it takes the pods of one template of one controller for bringers of the same
files. Once a node reports one of them as quarantined, none is placed afresh, on any node; what serves stays. So it
is with the other pods of its namespace and model id, on their own or of another controller; but another template
of the same one is what an owner mends a model with.

That ends when the node lifts it (the same pod's model is loaded after all, or the node's annotation says so),
or after QUARANTINE_SECONDS where the pod that reported it is gone, or with the template: another one has another
key. A row that only says that files are there says nothing: so does an agent that has just started. A binder that starts anew learns it from the reports, and from what it said itself in the conditions of
the pods that wait.
"""

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from berth.contract.ids import ModelId, NodeName, PodUid
from berth.contract.report import Failure, ModelReport, ModelState, NodeReport
from berth.kube.times import parse_time, rfc3339, utc_now
from binder.pod.template import Family, Template

# As long as an agent's own.
QUARANTINE_SECONDS = 24 * 3600.0
_MOST_TEMPLATES = 4096
_SAID = re.compile(r"took Triton down on node (\S+); none is placed until (\S+?Z)\b")
# Which an agent says of no files that it holds for bad.
_LOADED = (ModelState.LOADING, ModelState.READY)
# Of a digest; what an operator writes has that many characters at least.
_BEGINNING = 8

TemplateOf = Callable[[PodUid], Template | None]
_Model = tuple[str, ModelId]


@dataclass(slots=True)
class _Entry:
    """Of one node. `pod`: which one it was, if that is known; `is_listed`: the node's report says so still. `model` and
    `family`: whose files they are, beside the template's."""

    pod: PodUid | None
    until: datetime
    reason: str
    is_listed: bool
    annotation: str
    model: _Model | None = None
    family: Family = ""


class Quarantines:
    """By template and node. `follow` takes reports, `remember` what was said before."""

    def __init__(self, now: Callable[[], datetime] = utc_now) -> None:
        self._now = now
        self._known: dict[Template, dict[NodeName, _Entry]] = {}
        self._at: dict[NodeName, set[Template]] = {}
        self._of_model: dict[_Model, set[tuple[Template, NodeName]]] = {}
        # Until when what has been lifted would have reserved: conditions that say so still are of that one.
        self._lifted: OrderedDict[Template, datetime] = OrderedDict()

    def __len__(self) -> int:
        """How many templates are not placed."""
        return sum(self._entry(template) is not None for template in list(self._known))

    def follow(
        self,
        node: NodeName,
        report: NodeReport | None,
        lifted: str,
        template: TemplateOf,
        family: Callable[[PodUid], Family] = lambda _: "",
    ) -> None:
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
                self._note(key, node, model, lifted, family(model.pod_uid))

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

    def because(self, template: Template | None, *, model: _Model | None = None, family: Family = "") -> str:
        """Why no pod of the template is placed, nor of the model where another family's brought its files down; "" where
        nothing is known against it."""
        whose, help = "this pod", "the pods' template changes"
        found = None if template is None else self._entry(template)
        if found is None and model is not None:
            whose, help = "another pod of this model id", "the model id changes"
            found = self._entry_of_model(model, family)
        if found is None:
            return ""
        node, entry = found
        return (
            f"the files of {whose} took Triton down on node {node}; none is placed until"
            f" {rfc3339(entry.until)}, unless the quarantine on that node is lifted or {help}"
        )

    def _entry_of_model(self, model: _Model, family: Family) -> tuple[NodeName, _Entry] | None:
        """One that holds against pods of the model that are not of its own family: that one's other templates are
        other files."""
        for template, node in sorted(self._of_model.get(model, ())):
            entry = self._known.get(template, {}).get(node)
            if entry is None or (family and entry.family == family):
                continue
            if (found := self._entry(template)) is not None:
                return found
        return None

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

    def _note(self, key: Template, node: NodeName, model: ModelReport, lifted: str, family: Family) -> None:
        known = self._known.get(key, {}).get(node)
        until = self._now() + timedelta(seconds=QUARANTINE_SECONDS) if known is None else known.until
        # A report that had no room for the reason has named it before.
        reason = model.reason or ("" if known is None else known.reason)
        # The namespace is the pod's own, whatever a report says.
        whose = None if model.model_id is None else (key[0], model.model_id)
        if whose is None and known is not None:
            whose = known.model
        self._put(key, node, _Entry(model.pod_uid, until, reason, True, lifted, whose, family))

    def _put(self, key: Template, node: NodeName, entry: _Entry) -> None:
        self._forget_model(key, node)
        self._known.setdefault(key, {})[node] = entry
        self._at.setdefault(node, set()).add(key)
        if entry.model is not None:
            self._of_model.setdefault(entry.model, set()).add((key, node))
        while len(self._known) > _MOST_TEMPLATES:
            # Of the namespace that has the most, so that no tenant displaces another's: the first noted.
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
        self._forget_model(key, node)
        for index, one, other in ((self._known, key, node), (self._at, node, key)):
            _discard(index, one, other)

    def _forget_model(self, key: Template, node: NodeName) -> None:
        known = self._known.get(key, {}).get(node)
        if known is not None and known.model is not None:
            _discard(self._of_model, known.model, (key, node))


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

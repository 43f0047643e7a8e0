"""Which nodes take models with code, and whose.

Under the code rule `namespace` a Triton that holds a model with code holds models of that one namespace (`cache.tenants`).
"""

from typing import Final

from berth.contract.report import CODE_BACKENDS, CodeRule
from binder.cache.column import Bools
from binder.cache.table import Fact, NodeTable
from binder.cache.view import NodeView, Service
from binder.pod.demand import Demand
from binder.rules.report import SERVICE, is_ready
from binder.rules.rule import Context, Cure, PairRule, ShapeQuery, ShapeRule

MANY: Final = "*"  # more than one namespace; no namespace is called so


def _only(namespaces: frozenset[str]) -> str | None:
    return next(iter(namespaces), None) if len(namespaces) < 2 else MANY


# Whose models are on a node, and whose code: the namespace, None or MANY.
TENANTS = Fact(lambda view: _only(view.tenants), moves=False)
CODERS = Fact(lambda view: _only(view.coders), moves=False)


class CodeNotAllowed(ShapeRule):
    """The node takes no code."""

    name = "CodeNotAllowed"
    cures = frozenset({Cure.NODE})
    tells_for_all = True
    moves = True
    lasts = True

    def fails(self, query: ShapeQuery) -> Bools | None:
        if CODE_BACKENDS.isdisjoint(query.shape.requirements):
            return None
        return query.table.fact(SERVICE).where(
            query.rows, lambda service: is_ready(service) and service.code is CodeRule.NONE
        )

    def why(self, demand: Demand, view: NodeView) -> str:
        return f"{_code(demand)} is code, and the node takes none"


class CodeOfAnotherNamespace(PairRule):
    """The node keeps namespaces apart, and holds another one's code."""

    name = "CodeOfAnotherNamespace"
    cures = frozenset({Cure.POD_ENDS})

    def fails(self, context: Context, demand: Demand) -> Bools | None:
        return _not_own(context.table, CODERS, demand)

    def why(self, demand: Demand, view: NodeView) -> str:
        return (
            "it holds a model with code, and takes models of that one's namespace only; the pod's is"
            f" {demand.model.ref.namespace}"
        )


class ModelsOfOtherNamespaces(PairRule):
    """The node keeps namespaces apart, and the pod's code would be among models of others."""

    name = "ModelsOfOtherNamespaces"
    cures = frozenset({Cure.POD_ENDS})

    def fails(self, context: Context, demand: Demand) -> Bools | None:
        return _not_own(context.table, TENANTS, demand) if demand.has_code else None

    def favours(self, context: Context, demand: Demand) -> Bools | None:
        """Where the namespace's code is already, it takes the node from no other."""
        if not demand.has_code:
            return None
        return context.table.fact(CODERS).is_one_of((demand.model.ref.namespace,), context.table.all_rows)

    def why(self, demand: Demand, view: NodeView) -> str:
        return f"{_code(demand)} is code, and the node holds models of others"


def _not_own(table: NodeTable, whose: Fact, demand: Demand) -> Bools | None:
    """Nodes whose code rule keeps namespaces apart, and where others than the pod's are."""
    apart = table.fact(SERVICE).where(table.all_rows, _keeps_apart)
    if apart is None:
        return None
    fails: Bools = apart & ~table.fact(whose).is_one_of((None, demand.model.ref.namespace), table.all_rows)
    return fails if fails.any() else None  # most often there is none, and then nothing has to be judged anew


def _keeps_apart(service: Service | None) -> bool:
    return service is not None and service.code is CodeRule.NAMESPACE


def _code(demand: Demand) -> str:
    return ",".join(sorted(CODE_BACKENDS.intersection(demand.shape.requirements)))

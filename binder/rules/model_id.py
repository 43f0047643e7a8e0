"""One model of an id on a node: ids are each namespace's own."""

from binder.cache.column import Bools, Ints
from binder.cache.reservations import Reservation
from binder.cache.table import NodeTable
from binder.cache.view import NodeView
from binder.pod.demand import Demand
from binder.rules.rule import UNBOUNDED, Context, Cure, PairRule


class ModelAlreadyOnNode(PairRule):
    """A replica of the model is there, or may still be loaded there."""

    name = "ModelAlreadyOnNode"
    cures = frozenset({Cure.POD_ENDS})

    def fails(self, context: Context, demand: Demand) -> Bools | None:
        return context.mask(rows_with_replica(context.table, demand))

    def clashes(self, demand: Demand, reservation: Reservation) -> bool:
        model = demand.model
        return model.model_id is not None and (reservation.ref.namespace, reservation.model_id) == (
            model.ref.namespace,
            model.model_id,
        )

    def replicas_per_node(self, context: Context, demand: Demand) -> Ints | int:
        return UNBOUNDED if demand.model.model_id is None else 1

    def why(self, demand: Demand, view: NodeView) -> str:
        return f"id {demand.model.model_id}"


def rows_with_replica(table: NodeTable, demand: Demand) -> list[int]:
    """Where the pod's model is already."""
    model = demand.model
    return [] if model.model_id is None else table.rows_with_model((model.ref.namespace, model.model_id))

"""Host ports, as kube-scheduler's NodePorts counts them."""

from collections.abc import Iterable

from binder.cache.column import Bools, Ints
from binder.cache.reservations import Reservation
from binder.cache.table import NodeTable
from binder.cache.view import HostPort, NodeView
from binder.pod.demand import Demand
from binder.rules.rule import UNBOUNDED, Context, Cure, PairRule

_ANY_ADDRESS = "0.0.0.0"  # noqa: S104 - the API's wildcard


class HostPortTaken(PairRule):
    """Another pod has one of the pod's host ports, on the same address or on all."""

    name = "HostPortTaken"
    cures = frozenset({Cure.POD_ENDS})

    def fails(self, context: Context, demand: Demand) -> Bools | None:
        table = context.table
        return context.mask(sorted({row for port in demand.host_ports for row in _rows_with(table, port)}))

    def clashes(self, demand: Demand, reservation: Reservation) -> bool:
        return any(_takes(reservation.ports, port) for port in demand.host_ports)

    def replicas_per_node(self, context: Context, demand: Demand) -> Ints | int:
        return 1 if demand.host_ports else UNBOUNDED

    def why(self, demand: Demand, view: NodeView) -> str:
        taken = {(protocol, port) for _, protocol, port in view.host_ports}
        return ", ".join(
            f"{protocol} {port}"
            for _, protocol, port in sorted(demand.host_ports)
            if (protocol, port) in taken
        )


def _rows_with(table: NodeTable, port: HostPort) -> list[int]:
    """Nodes where the host port is taken."""
    address, protocol, number = port
    rows = table.rows_with_port(protocol, number)
    if address == _ANY_ADDRESS:
        return rows
    return [row for row in rows if _takes(table.view(row).host_ports, port)]


def _takes(taken: Iterable[HostPort], port: HostPort) -> bool:
    address, *rest = port
    return any(
        there == rest and (_ANY_ADDRESS in (address, other) or other == address) for other, *there in taken
    )

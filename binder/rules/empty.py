"""How many replicas of a model the nodes would hold if all else were gone. Pure.

Counted is what lasts: labels, taints that people set, what the server can do, the GPUs' sizes, allocatable amounts, one
replica of a model id a node. A node that is cordoned, silent or whose Triton is not ready comes back, and counts.
"""

from typing import Any

import numpy as np

from berth.contract.report import CODE_BACKENDS, CodeRule
from binder.cache.table import NO_MODEL, Bools, Ints, NodeTable, Service
from binder.engine.decision import Decider
from binder.pod.demand import Demand, Shape
from binder.rules.filters import affinity_mask, wanted_models
from binder.rules.node_selection import untolerated_taint
from binder.rules.reasons import Kind

# What an owner must change; other refusals by all nodes pass by themselves.
_HOPELESS = frozenset({Kind.UNSUPPORTED, Kind.QUARANTINED})
# Set and taken away by controllers, as nodes go and come.
_PASSING_TAINTS = "node.kubernetes.io/"
_PASSING_TROUBLES = frozenset({Kind.TRITON_NOT_READY})
_MANY = 2**20


def most_replicas(decider: Decider, demand: Demand) -> int:
    """At most so many replicas, those that are there included."""
    because = decider.because(demand)
    if because is not None and because.kind in _HOPELESS:
        return 0
    table = decider.table
    fits = _lasting_fits(table, demand.shape)
    if because is None:
        for _, elsewhere in decider.volumes.misfits(table, demand):
            fits &= ~elsewhere
    each = np.minimum(_by_gpus(table, demand.shape), _by_amounts(table, demand.shape))
    if demand.model.model_id is not None or demand.host_ports:
        each = np.minimum(each, 1)
    replicas = np.where(fits, each, 0)
    # Copies that stand where none would be placed any more stay.
    standing = sum(1 for row in decider.model_rows(demand) if not replicas[row])
    found = min(_apart(decider, demand, replicas), int(replicas.sum()))
    if any(decider.volumes.exclusive(demand)):
        found = min(found, 1)
    return found + standing


def _lasting_fits(table: NodeTable, shape: Shape) -> Bools:
    needed, rows = frozenset(shape.requirements), table.all_rows

    def serves(service: Service | None) -> bool:
        if service is None:
            return False
        if service.trouble is not None:
            return service.trouble in _PASSING_TROUBLES
        refused = service.code is CodeRule.NONE and not CODE_BACKENDS.isdisjoint(needed)
        return not refused and shape.server in (None, service.server) and needed <= service.capabilities

    def tolerated(taints: Any) -> bool:
        lasting = [taint for taint in taints or () if not taint[0].startswith(_PASSING_TAINTS)]
        return untolerated_taint(lasting, shape.tolerations) is None

    fits: Bools = table.live & affinity_mask(table, shape)
    fits &= table.service.map(rows, serves, np.bool_) & table.taints.map(rows, tolerated, np.bool_)
    return fits


def _by_gpus(table: NodeTable, shape: Shape) -> Ints:
    """By the sizes of the GPUs that are there. Copies that each take `count` different GPUs: no more than
    floor(s / (count - j)), s the shares on all GPUs but the j that have the most of them, for each j < count."""
    sizes = np.array([size for _, size in table.models], np.int64)
    shares = sizes // shape.request_bytes if shape.request_bytes else np.full(len(sizes), _MANY)
    shares = np.where(sizes > 0, np.minimum(shares, _MANY), _MANY)  # a size that nobody knows may be any
    shares[~wanted_models(table, shape)] = shares[NO_MODEL] = 0
    on: Ints = shares[table.gpu_model]
    count = shape.gpu_count
    if count == 1:
        alone: Ints = on.sum(axis=1)
        return alone
    rest = np.sort(on, axis=1).cumsum(axis=1)[:, ::-1]
    if count > on.shape[1]:
        return np.zeros(len(on), np.int64)
    most: Ints = np.min([rest[:, j] // (count - j) for j in range(count)], axis=0)
    return most


def _by_amounts(table: NodeTable, shape: Shape) -> Ints:
    most = np.full(len(table), _MANY, np.int64)
    for name, asked in shape.amounts:
        if asked > 0:
            most = np.minimum(most, table.allocatable(name) // asked)
    return np.maximum(most, 0)


def _apart(decider: Decider, demand: Demand, replicas: Ints) -> int:
    """One replica a domain, where replicas keep away from each other."""
    most, ref = int(replicas.sum()), demand.model.ref
    for term in demand.neighbours.anti_affinity:
        if term.matches(ref.namespace, decider.labels_of(ref.namespace), demand.labels):
            domains = decider.table.label(term.topology_key).codes[: len(replicas)]
            inside = domains[(replicas > 0) & (domains > 0)]
            most = min(most, len(np.unique(inside)) + int(replicas[domains == 0].sum()))
    return most

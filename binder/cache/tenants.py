"""Whose models are on a node, and whose code. Pure.

Under the code rule `namespace` a Triton that holds a model with code holds models of that one namespace. The
agent sees to it when a model is loaded. What it counts is what Triton holds; here that which is on its way
counts as well, as far as the pods say what they bring: a pod that requires a backend of programs
(`CODE_BACKENDS`) runs code, whatever it turns out to be. That is its owner's claim, who can change it at any
time, so it counts only where no other namespace has a model: code would not be placed among others, and what Triton
holds the report says.
"""

from collections.abc import Iterator, Mapping

from berth.contract.ids import PodUid
from berth.contract.report import ModelReport, ModelState
from binder.cache.reservations import Reservation

# Triton holds nothing of these.
_NOT_LOADED = (ModelState.FAILED, ModelState.LOST)


def tenants(
    reservations: Mapping[PodUid, Reservation], listed: Mapping[PodUid, ModelReport]
) -> tuple[frozenset[str], frozenset[str]]:
    """The namespaces of the models that are there or on their way, and the one that runs code, as far as its
    pods say so and it is alone. The namespace of a model is "", which is no tenant's, where the report had no room for it and its
    pod is gone."""
    here = list(_here(reservations, listed))
    names = frozenset(name for name, _ in here)
    has_code = any(one for _, one in here)
    return names, names if has_code and len(names) == 1 else frozenset()


def _here(
    reservations: Mapping[PodUid, Reservation], listed: Mapping[PodUid, ModelReport]
) -> Iterator[tuple[str, bool]]:
    for uid in reservations.keys() | listed.keys():
        reservation, model = reservations.get(uid), listed.get(uid)
        if model is not None and model.state in _NOT_LOADED:
            continue
        if reservation is None:
            assert model is not None
            yield model.namespace, False
        elif reservation.gpus or (model is not None and model.state is not ModelState.PENDING):
            # Without a GPU that the binder has chosen nothing is ever loaded for a pod.
            yield reservation.ref.namespace, reservation.has_code

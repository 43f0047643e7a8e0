"""Applies the watch of the node's pods to the table of models. No I/O."""

import logging

from agent.models import Models
from berth.contract.errors import InvalidPod
from berth.contract.ids import PodUid
from berth.contract.keys import Keys
from berth.contract.pod import has_ended, is_deleting, is_placed, parse_model_pod
from berth.kube.informer import Change, ChangeKind
from berth.runtime.logs import fields

log = logging.getLogger(__name__)


def note_pod(models: Models, change: Change, keys: Keys) -> None:
    """Take one change of the pods that are bound to this node.

    A pod without a GPU is not the binder's: its owner has put it here, and may put thousands. None of them
    can ever load a model, so none takes a line of the report or a model's name from a pod that can.

    A pod's annotations can be edited into nonsense while it serves. What they say is then unknown, but
    not whether the pod lives: its model stays as long as it does, and no longer.
    """
    pod = change.object
    uid = PodUid(pod["metadata"]["uid"])
    if change.kind is ChangeKind.GONE:
        models.lose_pod(uid)
        return
    try:
        if is_placed(pod, keys):
            models.see_pod(parse_model_pod(pod, keys))
    except InvalidPod as error:
        log.warning("pod not readable", extra=fields(pod=pod["metadata"]["name"], error=error))
    models.see_life(uid, ended=has_ended(pod), deleting=is_deleting(pod))

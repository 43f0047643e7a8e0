"""Each call of the API: which pod calls, does it live here, is the model its own."""

from collections.abc import Callable

from agent import placement
from agent.auth import Authenticator, NotAllowed, PodGuard
from agent.gpus import GpuReading
from agent.interceptor import Context, metadata_of, source_of
from agent.models import Model, Models
from agent.placement import GpuGone
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import ModelName, parse_model_name
from berth.contract.pod import ModelPod, PodRef
from berth.contract.report import Failure, ModelState


class Access:
    """`readings`: the GPUs that are known to be here; raises GpusUnknown. Its calls raise what `api` maps to a
    status."""

    def __init__(
        self,
        authenticator: Authenticator,
        guard: PodGuard,
        models: Models,
        readings: Callable[[], tuple[GpuReading, ...]],
    ) -> None:
        self.authenticator, self._guard = authenticator, guard
        self._models, self._readings = models, readings

    async def caller(self, context: Context) -> PodRef:
        return await self.authenticator.pod_of(metadata_of(context), source_of(context))

    async def pod(self, context: Context) -> ModelPod:
        """The calling pod, which lives on this node."""
        return await self._guard.admit(await self.caller(context))

    async def current(self, ref: PodRef) -> ModelPod | None:
        """The pod as the API server has it now; None if it is gone."""
        return await self._guard.current(ref)

    async def owned(self, text: str, context: Context) -> tuple[ModelPod, Model, ModelName]:
        """The calling pod and its model of this name. The name is checked last, so that others learn nothing by it."""
        pod = await self.pod(context)
        return pod, *self.claim(pod, text)

    def claim(self, pod: ModelPod, text: str) -> tuple[Model, ModelName]:
        """The pod's model of this name, whose name is its own from now on where the pod's labels give it."""
        ref, name = pod.ref, parse_model_name(text)
        if pod.model_name is not None and pod.model_name != name:
            raise NotAllowed(f"pod {ref} may use model {pod.model_name!r} only")
        self.require_chosen(pod)
        self._models.see_pod(pod)
        if pod.model_name is not None:
            return self._models.claim(ref.uid, name), name
        return self._models.own(ref.uid, name), name

    def require_chosen(self, pod: ModelPod) -> None:
        placement.require_chosen(pod, self._models.get(pod.ref.uid))

    def placed(self, pod: ModelPod, model: Model) -> GpuChoice:
        """The GPUs on which the model is loaded. Where one is gone the model fails: the binder goes by its state,
        and another node may take it."""
        gpu = placement.choice_of(pod, model)
        try:
            placement.require_here(pod, gpu, {reading.uuid for reading in self._readings()})
        except GpuGone as error:
            self._models.set(model, ModelState.FAILED, error.reason, failure=Failure.TRANSIENT)
            raise
        return gpu

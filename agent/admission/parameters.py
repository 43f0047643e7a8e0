"""Parameters of backends and accelerators: text in ModelConfig, and something else to its reader. `backends` has the
table of each; what it does not have is refused, but for what a program's own code may read."""

from agent.admission.backends import ACCELERATORS, Backend
from agent.admission.errors import InvalidModel
from agent.admission.files import ModelFiles, require_inside
from agent.admission.verdicts import understood
from berth.triton.wire import model_config_pb2 as pb

_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY/"
_PYTHON_PATHS = ("EXECUTION_ENV_PATH",)


def settle_parameters(config: pb.ModelConfig, backend: Backend, files: ModelFiles, *, where: str) -> None:
    """Write what was understood of each. Raises InvalidModel."""
    _settle_own(config, backend, files, where)
    _settle_accelerators(config, where)


def _settle_own(config: pb.ModelConfig, backend: Backend, files: ModelFiles, where: str) -> None:
    for name in sorted(config.parameters):
        one, place = config.parameters[name], f"{where}parameters[{name[:80]!r}]"
        if name in backend.parameters or not backend.is_program:
            one.string_value = understood(name, one.string_value, backend.parameters, place)
        elif name in _PYTHON_PATHS:
            value = one.string_value
            if not value.startswith(_MODEL_DIRECTORY):
                raise InvalidModel(f"{place}: {value[:80]!r}; {_MODEL_DIRECTORY}FILE is taken")
            path = value.removeprefix(_MODEL_DIRECTORY)
            require_inside(path, where=place)
            if not files.has(path):
                raise InvalidModel(f"{place}: there is no {path[:200]}")


def _settle_accelerators(config: pb.ModelConfig, where: str) -> None:
    both = config.optimization.execution_accelerators
    place = f"{where}optimization.execution_accelerators"
    for one in (*both.gpu_execution_accelerator, *both.cpu_execution_accelerator):
        if one.name not in ACCELERATORS:
            raise InvalidModel(f"{place}: {one.name[:80]!r} is none of {', '.join(sorted(ACCELERATORS))}")
        for name in sorted(one.parameters):
            shown = f"{place}.{one.name}[{name!r}]"
            one.parameters[name] = understood(name, one.parameters[name], ACCELERATORS[one.name], shown)

"""Launches of the kernels of compiled modules."""

from concurrent.futures import Future
from typing import TYPE_CHECKING

from gpt_cli.errors import ResourceError
from gpt_cli.ops.cuda import compiler, plans

if TYPE_CHECKING:
    from cupy.cuda.function import Module


class Launcher:
    """The kernels of some modules: a call launches one on the current stream."""

    def __init__(self, modules: "dict[str, Future[Module]]", device: plans.Device):
        """Take the module of each kernel by its name. A launch waits for the module it needs."""
        self._modules = modules
        self._device = device
        self._kernels: dict[str, compiler.Kernel] = {}

    def __call__(self, launch: plans.Launch, argument: bytes) -> None:
        """Launch a kernel with a struct."""
        kernel = self._kernels.get(launch.kernel)
        if kernel is None:
            module = self._module_of(launch.kernel)
            kernel = compiler.Kernel(module, launch.kernel, self._device.shared)
            self._kernels[launch.kernel] = kernel
        kernel.launch(launch.grid, launch.threads, launch.shared, argument)

    def _module_of(self, kernel: str) -> "Module":
        """Return a kernel's module; raise ResourceError if it could not be compiled or loaded."""
        try:
            return self._modules[kernel].result()
        except Exception as error:  # CuPy raises many types
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ResourceError(
                f"the GPU cannot load the kernel {kernel} ({reason}): free its memory, or use "
                "--device cpu"
            ) from error

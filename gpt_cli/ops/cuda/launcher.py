"""Launches of the kernels of compiled modules."""

from typing import Any

from gpt_cli.ops.cuda import compiler, plans


class Launcher:
    """The kernels of some modules: a call launches one on the current stream."""

    def __init__(self, modules: dict[str, Any], device: plans.Device):
        self._modules, self._device = modules, device
        self._kernels: dict[str, compiler.Kernel] = {}

    def __call__(self, launch: plans.Launch, argument: bytes) -> None:
        """Launch a kernel with a struct."""
        kernel = self._kernels.get(launch.kernel)
        if kernel is None:
            module = self._modules[launch.kernel]
            kernel = compiler.Kernel(module, launch.kernel, self._device.shared)
            self._kernels[launch.kernel] = kernel
        kernel.launch(launch.grid, launch.threads, launch.shared, argument)

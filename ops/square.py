"""x * x, element by element: the smallest complete operator with a backward kernel."""

from torch import Tensor

from loader.jit.operators.elementwise import elementwise


def square(x: Tensor) -> Tensor:
    """Square each element.

    Args:
        x: any shape and strides, float32, float64, float16 or bfloat16, on the CPU or a CUDA
            device.

    Returns:
        x * x, shape, dtype and device of `x`; differentiable, twice and more.

    Raises:
        TypeError: `x` is no tensor.
        RuntimeError: its dtype, layout or device does not fit; the message says which.
        loader.BuildError: the operator could not be compiled.

    Source: `square_reference`.
    """
    return _square(x)


def square_reference(x: Tensor) -> Tensor:
    """The same in plain PyTorch."""
    return x * x


_square, square_fw, square_bw, samples, benchmark = elementwise(square, square_reference)

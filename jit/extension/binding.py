"""The text that binds functions to Python, put behind the source.

It declares nothing but the module's own entry, so that no function's name can clash with one of it.
"""

from ..errors.cxx import literal
from .levels import Level


def binding(functions: dict[str, str], name: str, level: Level, error_handling: bool) -> str:
    """Return the text that binds functions as the module `name`."""
    if level.own_binding:
        entries = "".join(
            f"    octet_binding::entry<{i}, &{function}>({literal(function)}, {literal(doc)}),\n"
            for i, (function, doc) in enumerate(functions.items())
        )
        return (
            f"PyMODINIT_FUNC PyInit_{name}() {{\n"
            f"return octet_binding::module({literal(name)}, {{\n{entries}    {{}}}});\n}}\n"
        )
    wrap = "torch::wrap_pybind_function({})" if error_handling else "{}"
    lines = [
        f"m.def({literal(f)}, {wrap.format(f)}, {literal(doc)});" for f, doc in functions.items()
    ]
    return "\n".join(["PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {", *lines, "}", ""])

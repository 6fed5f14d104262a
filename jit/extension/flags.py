"""Flags as arguments: what the caller's strings say to the C++ compiler, nvcc and the linker."""

import re
import shlex

# Options that take the next word as their value.
_WITH_VALUE = {"-I", "-L", "-l", "-D", "-U", "-isystem", "-iquote", "-idirafter", "-include"}
_WITH_VALUE |= {"-Xcompiler", "-Xlinker", "-Xptxas", "-Xcudafe", "-gencode", "-arch", "-code"}
_WITH_VALUE |= {"-x", "-T", "-u", "-z", "--compiler-options", "--generate-code", "-rpath", "-std"}
_WITH_VALUE |= {"--gpu-architecture", "--ptxas-options", "-maxrregcount", "--maxrregcount", "-O"}
# Options of nvcc that matter to the code of the GPU alone, and those that a host half needs too.
_DEVICE_ONLY = re.compile(
    r"-?-(?:use_fast_math|lineinfo|generate-line-info|expt-\w[\w-]*|extended-lambda|fmad=.*|ftz=.*"
    r"|prec-\w+=.*|maxrregcount=.*|res-usage|resource-usage|threads=.*|t=?\d+|split-compile=.*"
    r"|l[\w-]+|restrict|extra-device-vectorization|Wno-deprecated-gpu-targets|Xptxas=.*|Xcudafe=.*"
    r"|ptxas-options=.*|diag-suppress=.*|gencode=.*|generate-code=.*|arch=.*|gpu-architecture=.*)"
)
_DEVICE_ONLY_WITH_VALUE = {"-Xptxas", "--ptxas-options", "-gencode", "--generate-code", "-arch"}
_DEVICE_ONLY_WITH_VALUE |= {"-maxrregcount", "--maxrregcount", "-Xcudafe", "-code"}


def argv(flags: tuple[str, ...]) -> list[str]:
    """Return flags as arguments: torch's load() writes them into a shell's command line.

    So one string may hold several, and quotation marks keep words together. What is special to a
    shell otherwise is taken as it is, and a path with spaces in it need not be quoted.
    """
    words: list[str] = []
    for flag in map(str.strip, flags):
        try:
            split = shlex.split(flag)
        except ValueError:
            split = [flag]
        several = len(split) > 1 and (
            split[0] in _WITH_VALUE or any(word.startswith("-") for word in split[1:])
        )
        quoted = any(mark in flag for mark in "'\"\\")
        words += split if several or quoted else [flag] if flag else []
    return words


def beside(folder: str, cuda: bool) -> list[str]:
    """Return the flags that have a text find "headers" as a file does that lies in a folder."""
    if not cuda:
        return ["-iquote", folder]
    if re.search(r"[\s,]", folder):  # which nvcc would take for two words
        return [f"-I{folder}"]
    return ["-Xcompiler", f"-iquote,{folder}"]


def host_flags(cuda_flags: list[str]) -> list[str] | None:
    """Return what nvcc would hand to the host's compiler; None where that is not certain."""
    found, words = [], iter(cuda_flags)
    for word in words:
        if word in ("-Xcompiler", "--compiler-options"):
            found += next(words, "").split(",")
        elif word.startswith(("-Xcompiler=", "--compiler-options=")):
            found += word.partition("=")[2].split(",")
        elif word in _DEVICE_ONLY_WITH_VALUE:
            next(words, None)
        elif word in ("-I", "-D", "-U", "-isystem", "-O", "-std"):
            value = next(words, "")
            found += [f"{word}{'=' if word == '-std' else ''}{value}"]
        elif re.fullmatch(r"-[IDU].+|-O[0-3]|-std=.+|-g", word):
            found.append(word)
        elif not _DEVICE_ONLY.fullmatch(word):
            return None
    return found

// What libraries of operators need beside their functions, without any of torch's headers.
#pragma once
#include <unistd.h>

#include <cstdlib>
#include <string>

/// Whether loader declared this schema when it was imported: jit/operators/schemas.py, which names
/// its process, since the environment goes on to others.
inline bool is_declared(const std::string& schema) {
    const char* const declared = std::getenv("OCTET_DECLARED");
    char* names = nullptr;
    if (!declared || std::strtol(declared, &names, 10) != getpid()) return false;
    const std::string name = " " + schema.substr(0, schema.find('(')) + " ";
    return (std::string(names) + " ").find(name) != std::string::npos;
}

/// A function of CUDA sources, null where those are not compiled.
#ifdef OCTET_CUDA
#define OCTET_CUDA_LAUNCHER(function) (&(function))
#else
#define OCTET_CUDA_LAUNCHER(function) static_cast<decltype(&(function))>(nullptr)
#endif

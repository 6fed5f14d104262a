# add_torch_python_module(NAME SOURCE...): a pybind11 module whose functions take torch.Tensor.
# The operators need no such module: torch.ops.load_library and the dispatcher do all of it, for
# any Python. It is here because three traps wait for those who write one.
function(add_torch_python_module name)
    # Trap: CMake takes the first Python that it likes; it has to be the one that has torch.
    find_package(Python QUIET COMPONENTS Interpreter)
    if(NOT Python_Interpreter_FOUND)
        message(FATAL_ERROR "${name}: CMake found no Python; pass "
            "-DPython_EXECUTABLE=\"$(command -v python)\"")
    endif()
    if("${TORCH_INSTALL_PREFIX}" MATCHES "/python([0-9]+[.][0-9]+)/")
        set(wanted "${CMAKE_MATCH_1}")
        if(NOT wanted STREQUAL "${Python_VERSION_MAJOR}.${Python_VERSION_MINOR}")
            message(FATAL_ERROR "${name}: this torch is for Python ${wanted}, and CMake took "
                "${Python_EXECUTABLE}, ${Python_VERSION}; pass "
                "-DPython_EXECUTABLE=\"$(command -v python)\"")
        endif()
    endif()

    # Trap: a module named like one of the standard library, `operator` say, is never imported.
    execute_process(
        COMMAND "${Python_EXECUTABLE}" -c "import sys; sys.exit('${name}' in sys.stdlib_module_names)"
        RESULT_VARIABLE clash)
    if(clash)
        message(FATAL_ERROR
            "${name} is a module of Python's standard library; choose another name")
    endif()

    # Trap: an interpreter without its headers.
    find_package(Python QUIET COMPONENTS Interpreter Development.Module)
    if(NOT Python_Development.Module_FOUND)
        message(FATAL_ERROR
            "${name}: Python.h of ${Python_EXECUTABLE} is not there. Install "
            "the headers (Debian, Ubuntu: apt install python3-dev), or name the Python that has "
            "both them and torch: -DPython_EXECUTABLE=\"$(command -v python)\"")
    endif()

    # Trap: torch.Tensor's conversions are in libtorch_python, which TORCH_LIBRARIES lacks. Without
    # it the module links, and its import ends in "undefined symbol: ...type_caster...Tensor...".
    find_library(TORCH_PYTHON_LIBRARY torch_python PATHS "${TORCH_INSTALL_PREFIX}/lib"
        NO_DEFAULT_PATH)
    if(NOT TORCH_PYTHON_LIBRARY)
        message(FATAL_ERROR "${name}: libtorch_python.so is not in ${TORCH_INSTALL_PREFIX}/lib; "
            "a libtorch for C++ alone lacks it, torch from pip has it")
    endif()

    Python_add_library(${name} MODULE ${ARGN})
    set_target_properties(${name} PROPERTIES  # torch's headers ask for C++20 from 2.15 on
        CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF CXX_VISIBILITY_PRESET hidden)
    # The name in PYBIND11_MODULE must be the file's: one definition serves both.
    target_compile_definitions(${name} PRIVATE TORCH_EXTENSION_NAME=${name})
    target_link_libraries(${name} PRIVATE torch_cpu c10 "${TORCH_PYTHON_LIBRARY}")
endfunction()

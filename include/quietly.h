// Functions of torch's under their own names, and torch kept from warning of what is done on
// purpose. Knows nothing of torch's headers.
#pragma once
#include <dlfcn.h>

/// A function of torch's; null where this torch has none of that name.
template <typename Function>
Function* of_torch(const char* name, const char* library = "libtorch_cpu.so") {
    void* const torch = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
    return torch ? reinterpret_cast<Function*>(dlsym(torch, name)) : nullptr;
}

/// While one lives, torch does not say on this thread that a kernel was overridden, and still says
/// so later of others: it warns once in a process, unless asked to warn always. Laid out as
/// c10::WarningHandler is, by the Itanium C++ ABI.
class Quietly {
  public:
    Quietly() {
        if (!get_ || !set_ || !is_always_ || !set_always_) return;
        quiet_ = true, before_ = get_(), always_ = is_always_();
        set_(this), set_always_(true);
    }
    virtual ~Quietly() {
        if (quiet_) set_always_(always_), set_(before_);
    }
    virtual void process(const void*) {}

  private:
    template <typename Function>
    static Function* of_c10(const char* name) {
        return of_torch<Function>(name, "libc10.so");
    }
    Quietly* (*const get_)() = of_c10<Quietly*()>("_ZN3c1012WarningUtils19get_warning_handlerEv");
    void (*const set_)(Quietly*) =
        of_c10<void(Quietly*)>("_ZN3c1012WarningUtils19set_warning_handlerEPNS_14WarningHandlerE");
    bool (*const is_always_)() = of_c10<bool()>("_ZN3c1012WarningUtils14get_warnAlwaysEv");
    void (*const set_always_)(bool) = of_c10<void(bool)>("_ZN3c1012WarningUtils14set_warnAlwaysEb");
    bool quiet_ = false, always_ = false;
    Quietly* before_ = nullptr;
};

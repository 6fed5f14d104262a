// Linked to kernels that run on the CPU: a fault in one (a null pointer, an index far outside, an
// integer divided by zero) ends its launch with a message, where it would end the process.
#include <pthread.h>

#include <csetjmp>
#include <csignal>
#include <cstdio>

namespace {

struct Fault {
    int number;
    const char* text;  // takes the address
    struct sigaction before;
};
Fault faults[] = {{SIGSEGV, "a read or write at address 0x%lx, where nothing is", {}},
                  {SIGBUS, "a read or write at address 0x%lx, where no memory is", {}},
                  {SIGFPE, "an integer divided by zero, at the instruction 0x%lx", {}},
                  {SIGILL, "an illegal instruction, at 0x%lx", {}}};

// One launch at a time in a process, which emulate.py sees to.
pthread_t owner;
sigjmp_buf back;
const char* text;
unsigned long place;
alignas(16) char room[1 << 16];  // for the handler, should the kernel have used up the stack

void on_fault(int number, siginfo_t* info, void*) {
    for (const Fault& fault : faults) {
        if (fault.number != number) continue;
        if (!pthread_equal(pthread_self(), owner)) {  // not ours: it comes again, for whose it is
            sigaction(number, &fault.before, nullptr);
            return;
        }
        text = fault.text, place = reinterpret_cast<unsigned long>(info->si_addr);
    }
    siglongjmp(back, 1);
}

}  // namespace

/// Calls `body`; null, or what went wrong in it.
extern "C" const char* octet_guarded(void (*body)(void*), void* state) {
    static char said[128];
    stack_t ours = {room, 0, sizeof room}, theirs;
    sigaltstack(&ours, &theirs);
    struct sigaction action = {};
    action.sa_sigaction = on_fault, action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    owner = pthread_self(), text = nullptr;
    for (Fault& fault : faults) sigaction(fault.number, &action, &fault.before);
    if (!sigsetjmp(back, 1)) body(state);
    for (const Fault& fault : faults) sigaction(fault.number, &fault.before, nullptr);
    sigaltstack(&theirs, nullptr);
    if (!text) return nullptr;
    std::snprintf(said, sizeof said, text, place);
    return said;
}

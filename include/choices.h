// What a choice between ways of doing a call was, and what each would take, told to who asks:
// `loader.explain` and LOADER_VERBOSE. Where nobody does it costs one load.
#pragma once
#include <cstdio>
#include <initializer_list>

extern "C" {
/// Takes a line: operator, what was chosen of, the way taken, why, and pairs of each way's name and
/// microseconds, with tabs between them. Null where nobody asks. One to a library.
__attribute__((weak, visibility("hidden"))) void (*octet_choices)(const char* line) = nullptr;

/// What loader asks by.
__attribute__((weak, visibility("default"))) void octet_tell_choices(void (*to)(const char* line)) {
    __atomic_store_n(&octet_choices, to, __ATOMIC_RELAXED);
}
}

/// A way of doing a call, and the microseconds that it would take by its operator's rates (rates/);
/// NaN where no model says so.
struct Way {
    const char* name;
    double us;
};
constexpr double kUnknown = __builtin_nan("");

[[gnu::cold, gnu::noinline]] inline void tell_choice_now(void (*to)(const char*), const char* op,
                                                         const char* what, const char* taken,
                                                         const char* why,
                                                         std::initializer_list<Way> ways) {
    char line[1024];
    int end = snprintf(line, sizeof line, "%s\t%s\t%s\t%s", op, what, taken, why);
    for (const Way& way : ways)
        if (end > 0 && end < int(sizeof line))
            end += snprintf(line + end, sizeof line - end, "\t%s\t%.1f", way.name, way.us);
    to(line);
}

/// Tells that of these ways `taken` is.
inline void tell_choice(const char* op, const char* what, const char* taken, const char* why,
                        std::initializer_list<Way> ways = {}) {
    if (auto* const to = __atomic_load_n(&octet_choices, __ATOMIC_RELAXED))
        tell_choice_now(to, op, what, taken, why, ways);
}

// Linked into a unit's library that is to take the place of one which is loaded: the calls by which
// its static initialisers would register operators end here, and are kept until asked for.
//
// The functions have the names of torch's C interface. Hidden, they bind within the library, which
// is otherwise made of the same objects as the one in the store.
#include <stdint.h>

#include <deque>
#include <string>

#include "../../include/quietly.h"

#define HIDDEN __attribute__((visibility("hidden")))
#define PUBLIC __attribute__((visibility("default")))

namespace {

using Kernel = void (*)(uint64_t* stack, uint64_t inputs, uint64_t outputs);
using Init = int32_t(const char* ns, const char* k, const char* file, uint32_t line, void**);
using InitFragment = int32_t(const char* ns, const char* file, uint32_t line, void**);
using Define = int32_t(void* library, const char* schema);
using Implement = int32_t(void* library, const char* name, Kernel, uint64_t version);
using Delete = int32_t(void* library);

struct Block {  // one STABLE_TORCH_LIBRARY_FRAGMENT or _IMPL
    std::string ns, key;
    void* registered = nullptr;
};
struct Entry {  // one m.def or m.impl
    Block* block;
    std::string text;  // a schema, or the name of an operator
    Kernel kernel;     // null for a schema
    uint64_t version;
};

// Functions, since the initialisers of other files come first.
std::deque<Block>& blocks() {
    static auto& kept = *new std::deque<Block>;
    return kept;
}
std::deque<Entry>& entries() {
    static auto& kept = *new std::deque<Entry>;
    return kept;
}

int32_t keep_block(const char* ns, const char* key, void** library) {
    *library = &blocks().emplace_back(Block{ns, key});
    return 0;
}

int32_t keep_entry(void* library, const char* text, Kernel kernel, uint64_t version) {
    entries().push_back({static_cast<Block*>(library), text, kernel, version});
    return 0;
}

}  // namespace

extern "C" {

HIDDEN int32_t aoti_torch_library_init_fragment(const char* ns, const char*, uint32_t,
                                                void** library) {
    return keep_block(ns, "", library);
}
HIDDEN int32_t aoti_torch_library_init_def(const char* ns, const char*, uint32_t, void** library) {
    return keep_block(ns, "", library);
}
HIDDEN int32_t aoti_torch_library_init_impl(const char* ns, const char* key, const char*, uint32_t,
                                            void** library) {
    return keep_block(ns, key, library);
}
HIDDEN int32_t aoti_torch_library_def(void* library, const char* schema) {
    return keep_entry(library, schema, nullptr, 0);
}
HIDDEN int32_t aoti_torch_library_impl(void* library, const char* name, Kernel kernel) {
    return keep_entry(library, name, kernel, 0);
}
HIDDEN int32_t torch_library_impl(void* library, const char* name, Kernel kernel,
                                  uint64_t version) {
    return keep_entry(library, name, kernel, version);
}
HIDDEN int32_t aoti_torch_delete_library_object(void*) { return 0; }

/// What the library would register: namespace, dispatch key and text of entry `i`, the key empty
/// for a schema; false where there are no more.
PUBLIC int octet_swap_entry(size_t i, const char** ns, const char** key, const char** text) {
    if (i >= entries().size()) return 0;
    const Entry& entry = entries()[i];
    *ns = entry.block->ns.c_str(), *key = entry.block->key.c_str(), *text = entry.text.c_str();
    return 1;
}

/// Registers the kernels, ahead of those that were there: from here on calls come to this library.
/// `schemas` has a 1 for each entry that is a schema which torch does not know yet. 0, or an error.
PUBLIC int octet_swap_commit(const char* schemas) {
    const auto init = of_torch<Init>("aoti_torch_library_init_impl");
    const auto fragment = of_torch<InitFragment>("aoti_torch_library_init_fragment");
    const auto define = of_torch<Define>("aoti_torch_library_def");
    const auto implement = of_torch<Implement>("torch_library_impl");
    if (!init || !fragment || !define || !implement) return 1;
    const Quietly quietly;
    for (const Entry& entry : entries()) {
        void* library = nullptr;  // never deleted: an operator once defined stays
        if (*schemas++ == '1' && (fragment(entry.block->ns.c_str(), __FILE__, __LINE__, &library) ||
                                  define(library, entry.text.c_str())))
            return 2;
    }
    for (Block& block : blocks()) {
        if (block.key.empty() || block.registered) continue;
        if (init(block.ns.c_str(), block.key.c_str(), __FILE__, __LINE__, &block.registered))
            return 3;
        for (const Entry& entry : entries())
            if (entry.block == &block && entry.kernel &&
                implement(block.registered, entry.text.c_str(), entry.kernel, entry.version))
                return 4;
    }
    return 0;
}

/// Takes the kernels back; those that were there before are in place again, unless newer ones are.
PUBLIC void octet_swap_withdraw() {
    const auto remove = of_torch<Delete>("aoti_torch_delete_library_object");
    for (Block& block : blocks()) {
        if (block.registered) remove(block.registered);
        block.registered = nullptr;
    }
}
}

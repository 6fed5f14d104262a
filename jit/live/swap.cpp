// Linked into a unit's library that is to take the place of one which is loaded: the calls by which
// its static initialisers would register operators end here, and are kept until asked for.
//
// The functions have the names of torch's C interface. Hidden, they bind within the library, which
// is otherwise made of the same objects as the one in the store.
#include <stdint.h>
#include <string.h>

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

constexpr int kMost = 64;

struct Block {  // one STABLE_TORCH_LIBRARY_FRAGMENT or _IMPL
    char ns[64], key[64];
    void* registered;
};
struct Entry {  // one m.def or m.impl
    Block* block;
    char text[2048];  // a schema, or the name of an operator
    Kernel kernel;    // null for a schema
    uint64_t version;
};

Block blocks[kMost];
Entry entries[kMost];
int block_count = 0, entry_count = 0;
bool too_many = false;

int32_t keep_block(const char* ns, const char* key, void** library) {
    if (block_count == kMost) {
        too_many = true;
        return 1;
    }
    Block& block = blocks[block_count++];
    strncpy(block.ns, ns, sizeof(block.ns) - 1);
    strncpy(block.key, key, sizeof(block.key) - 1);
    *library = &block;
    return 0;
}

int32_t keep_entry(void* library, const char* text, Kernel kernel, uint64_t version) {
    if (entry_count == kMost || strlen(text) >= sizeof(Entry::text)) {
        too_many = true;
        return 1;
    }
    Entry& entry = entries[entry_count++];
    entry.block = static_cast<Block*>(library);
    strcpy(entry.text, text);
    entry.kernel = kernel;
    entry.version = version;
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
/// for a schema; false where there are no more. -1 counts as too many to keep.
PUBLIC int octet_swap_entry(int i, const char** ns, const char** key, const char** text) {
    if (too_many) return -1;
    if (i >= entry_count) return 0;
    *ns = entries[i].block->ns;
    *key = entries[i].block->key;
    *text = entries[i].text;
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
    for (int i = 0; i < entry_count; ++i) {
        const Entry& entry = entries[i];
        void* library = nullptr;  // never deleted: an operator once defined stays
        if (!entry.kernel && schemas[i] == '1' &&
            (fragment(entry.block->ns, __FILE__, __LINE__, &library) ||
             define(library, entry.text)))
            return 2;
    }
    for (int b = 0; b < block_count; ++b) {
        Block& block = blocks[b];
        if (!block.key[0] || block.registered) continue;
        if (init(block.ns, block.key, __FILE__, __LINE__, &block.registered)) return 3;
        for (int i = 0; i < entry_count; ++i)
            if (entries[i].block == &block && entries[i].kernel &&
                implement(block.registered, entries[i].text, entries[i].kernel, entries[i].version))
                return 4;
    }
    return 0;
}

/// Takes the kernels back; those that were there before are in place again, unless newer ones are.
PUBLIC void octet_swap_withdraw() {
    const auto remove = of_torch<Delete>("aoti_torch_delete_library_object");
    for (int b = 0; b < block_count; ++b) {
        if (blocks[b].registered) remove(blocks[b].registered);
        blocks[b].registered = nullptr;
    }
}
}

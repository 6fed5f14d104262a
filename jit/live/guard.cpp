// An allocator that catches what a kernel writes outside its tensors. A trial of an edited kernel
// runs with this library preloaded: torch takes every tensor's memory from posix_memalign.
//
// Each block ends where a page begins that may not be touched, and begins after another; the bytes
// that alignment leaves over hold a pattern, which is looked at when the block is freed, and at the
// end. The block itself is filled with NaN, so that what a kernel leaves unwritten is seen.
// Addresses are not used twice, so that memory in use after it was freed is caught too.
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <atomic>
#include <mutex>

namespace {

constexpr uintptr_t kPage = 4096;
constexpr size_t kRegion = size_t(1) << 36;  // of addresses, not of memory
constexpr int kMost = 1 << 16;
constexpr unsigned char kPattern = 0xA5;
constexpr unsigned char kUnwritten = 0xFF;  // NaN in every floating type

struct Block {
    unsigned char *begin, *data;  // pages from begin on; what the caller got
    size_t size, pages;           // bytes asked for, and of all pages
    bool live;
};

Block blocks[kMost];
int count = 0;
unsigned char *region = nullptr, *next = nullptr;
std::atomic<bool> armed{false};
std::mutex mutex;
char complaint[256];

/// Notes the first byte of a block that should hold the pattern and does not.
void look(const Block& block) {
    const unsigned char* const after = block.data + block.size;
    for (const unsigned char* p = block.begin; p < block.begin + block.pages; ++p) {
        if (p == block.data) p = after;
        if (p == block.begin + block.pages) return;
        if (*p == kPattern || complaint[0]) continue;
        const bool before = p < block.data;
        snprintf(complaint, sizeof(complaint), "wrote %zu bytes %s of a tensor's %zu bytes",
                 size_t(before ? block.data - p : p - after + 1),
                 before ? "before the beginning" : "past the end", block.size);
    }
}

}  // namespace

extern "C" {

/// From now on blocks are guarded, or no longer.
__attribute__((visibility("default"))) void octet_guard(int on) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!region) {
        void* found =
            mmap(nullptr, kRegion, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (found == MAP_FAILED) return;
        region = next = static_cast<unsigned char*>(found);
    }
    armed = on != 0;
}

/// What was written outside, if anything was; an empty text otherwise.
__attribute__((visibility("default"))) const char* octet_guard_check() {
    std::lock_guard<std::mutex> lock(mutex);
    for (int i = 0; i < count; ++i)
        if (blocks[i].live) look(blocks[i]);
    return complaint;
}

__attribute__((visibility("default"))) int posix_memalign(void** out, size_t alignment,
                                                          size_t size) {
    using Function = int (*)(void**, size_t, size_t);
    static const auto real = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "posix_memalign"));
    if (!armed || alignment > kPage) return real(out, alignment, size);
    std::lock_guard<std::mutex> lock(mutex);
    const size_t rounded = (size + alignment - 1) / alignment * alignment;
    const size_t pages = (rounded + kPage - 1) / kPage * kPage;
    if (count == kMost || next + pages + 2 * kPage > region + kRegion)
        return real(out, alignment, size);
    unsigned char* const begin = next + kPage;
    if (mprotect(begin, pages, PROT_READ | PROT_WRITE)) return ENOMEM;
    next = begin + pages;
    memset(begin, kPattern, pages);
    memset(begin + pages - rounded, kUnwritten, size);
    blocks[count++] = {begin, begin + pages - rounded, size, pages, true};
    *out = begin + pages - rounded;
    return 0;
}

__attribute__((visibility("default"))) void free(void* data) {
    using Function = void (*)(void*);
    static const auto real = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "free"));
    auto* const address = static_cast<unsigned char*>(data);
    if (!region || address < region || address >= region + kRegion) return real(data);
    std::lock_guard<std::mutex> lock(mutex);
    int low = 0, high = count;  // by address, as addresses only grow
    while (low < high) {
        const int middle = (low + high) / 2;
        blocks[middle].data < address ? low = middle + 1 : high = middle;
    }
    if (low == count || blocks[low].data != address || !blocks[low].live) return;
    look(blocks[low]);
    blocks[low].live = false;
    mprotect(blocks[low].begin, blocks[low].pages, PROT_NONE);
    madvise(blocks[low].begin, blocks[low].pages, MADV_DONTNEED);
}
}

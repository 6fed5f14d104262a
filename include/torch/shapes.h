// Shapes of an operator's tensors, checked by named sizes: "(N, 8, F)", "(..., 3)".
// jit/operators/shapes.py says the same of tensors without data.
#pragma once
#include <string>
#include <string_view>

#include "torch/glue.h"

/// The sizes that an operator's tensors have in common, by name. A name is bound by the first
/// tensor that has it; where a later one differs the message says which size, what was expected and
/// what came. Patterns and tensors must outlive it. Text is made only for messages.
class Sizes {
  public:
    explicit Sizes(const char* op) : op_(op) {}

    /// The size of a name that is bound.
    int64_t operator[](std::string_view name) const { return find(name)->size; }

    /// Refuses an argument that has not the shape of `pattern`; `cure` ends the message.
    void match(const char* argument, const Tensor& x, const char* pattern, const char* cure = "") {
        if (!fits(x, pattern, false))
            raise(op_, std::string(argument) + " must be " + pattern + ", got " + shape_text(x) +
                           (*cure ? "; " : "") + cure);
        std::string_view rest = pattern, part;
        for (int64_t d = before(x, pattern); next(rest, part); ++d) {
            if (!is_name(part)) continue;
            if (const Bound* known = find(part)) {
                if (known->size != x.size(d))
                    raise(op_, std::string(known->argument) + " " + known->pattern + " and " +
                                   argument + " " + pattern + " must have the same " +
                                   std::string(part) + ", got " + shape_text(*known->tensor) +
                                   " and " + shape_text(x));
            } else if (count_ < kMost) {
                bound_[count_++] = {part, x.size(d), argument, pattern, &x};
            }
        }
    }

    /// The same of an argument whose shape the others before it decide, all of it or in part.
    void match_known(const char* argument, const Tensor& x, const char* pattern) {
        if (!fits(x, pattern, true)) {
            std::string known;
            for (std::string_view rest = pattern, part; next(rest, part);) {
                const Bound* found = find(part);
                known += (known.empty() ? "(" : ", ") +
                         (found ? std::to_string(found->size) : std::string(part));
            }
            raise(op_, std::string(argument) + " must be " + pattern + " = " + known + "), got " +
                           shape_text(x));
        }
        match(argument, x, pattern);
    }

  private:
    static constexpr int kMost = 12;
    struct Bound {
        std::string_view name;
        int64_t size;
        const char *argument, *pattern;
        const Tensor* tensor;
    };

    static bool is_digit(char c) { return c >= '0' && c <= '9'; }
    static bool is_name(std::string_view part) { return !is_digit(part[0]); }

    /// Takes the next of "(N, 8, F), with words behind" off a pattern; false at its end.
    static bool next(std::string_view& rest, std::string_view& part) {
        const auto is_part = [](char c) {  // isalnum(c) asks for the locale
            return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
        };
        size_t begin = 0;
        while (begin < rest.size() && !is_part(rest[begin]) && rest[begin] != ')') ++begin;
        size_t end = begin;
        while (end < rest.size() && is_part(rest[end])) ++end;
        part = rest.substr(begin, end - begin);
        rest = rest.substr(end);
        return !part.empty();
    }
    /// How many dimensions of x come before those that a pattern names: of "(..., 3)", any number.
    static int64_t before(const Tensor& x, std::string_view pattern) {
        if (pattern.substr(0, 4) != "(...") return 0;
        int64_t named = 0;
        for (std::string_view part; next(pattern, part);) ++named;
        return x.dim() < named ? 0 : x.dim() - named;
    }

    const Bound* find(std::string_view name) const {
        for (int i = 0; i < count_; ++i)
            if (bound_[i].name == name) return &bound_[i];
        return nullptr;
    }

    /// Whether rank and numbers are the pattern's, sizes of one name alike, and, if `named`, those
    /// whose names are bound.
    bool fits(const Tensor& x, std::string_view rest, bool named) const {
        const int64_t first = before(x, rest);
        int64_t d = first;
        std::string_view parts[kMost];
        for (std::string_view part; next(rest, part); ++d) {
            if (d == x.dim() || d - first == kMost) return false;
            parts[d - first] = part;
            int64_t expected = 0;
            if (is_name(part)) {
                const Bound* known = named ? find(part) : nullptr;
                expected = known ? known->size : x.size(d);
                for (int64_t e = first; e < d; ++e)
                    if (parts[e - first] == part) expected = x.size(e);
            } else {
                for (const char digit : part) expected = 10 * expected + (digit - '0');
            }
            if (x.size(d) != expected) return false;
        }
        return d == x.dim();
    }

    const char* op_;
    int count_ = 0;
    Bound bound_[kMost];
};

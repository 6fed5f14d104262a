// add2 and trilinear_interpolation with its backward, called from C++ through torch's dispatcher.
//
//   octet_cpp FILE [cpu|cuda] [N] [F]
//
// Inputs follow a formula that any language can repeat exactly. FILE receives, as raw float32,
// add2(feats, feats), out (N, F), grad_feats (N, 8, F) and grad_points (N, 3).
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

using at::Tensor;

/// The operator `octet::name`, with the C++ types of its schema.
template <typename Signature>
auto find(const char* name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

/// Element i is (step * i mod 1024) / 512 - 1, in [-1, 1): exact in float32.
Tensor sample(at::IntArrayRef shape, int64_t step) {
    Tensor x = at::empty(shape, at::kFloat);
    float* data = x.mutable_data_ptr<float>();
    for (int64_t i = 0; i < x.numel(); ++i) data[i] = float(step * i % 1024) / 512 - 1;
    return x;
}

void append(std::ofstream& file, const Tensor& x) {
    const Tensor host = x.cpu();
    file.write(static_cast<const char*>(host.const_data_ptr()), std::streamsize(host.nbytes()));
}

/// Median of 21 runs in microseconds; `run` returns when the result is there.
double median_us(const std::function<void()>& run) {
    std::vector<double> times(21);
    for (double& time : times) {
        const auto start = std::chrono::steady_clock::now();
        run();
        const std::chrono::duration<double, std::micro> took =
            std::chrono::steady_clock::now() - start;
        time = took.count();
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

/// Calls the operators, writes what they return, prints how long they take; the exit status.
int run(const std::string& path, const std::string& device, int64_t N, int64_t F) {
    if (N < 1 || F < 1) {
        std::fprintf(stderr, "octet_cpp: N and F must be 1 or more, got %lld and %lld\n",
                     (long long)N, (long long)F);
        return 2;
    }
    const c10::InferenceMode no_autograd;  // the derivative is called below by its own name
    const auto add2 = find<Tensor(const Tensor&, const Tensor&)>("octet::add2");
    const auto forward =
        find<Tensor(const Tensor&, const Tensor&)>("octet::trilinear_interpolation");
    const auto backward =
        find<std::tuple<Tensor, Tensor>(const Tensor&, const std::optional<Tensor>&, const Tensor&,
                                        bool, bool)>("octet::trilinear_interpolation_backward");

    const Tensor feats = sample({N, 8, F}, 7919).to(device),
                 points = sample({N, 3}, 337).to(device);
    const Tensor grad_out = sample({N, F}, 271).to(device);
    const Tensor sum = add2.call(feats, feats), out = forward.call(feats, points);
    const auto [grad_feats, grad_points] = backward.call(grad_out, feats, points, true, true);

    std::ofstream file(path, std::ios::binary);
    for (const Tensor& x : {sum, out, grad_feats, grad_points}) append(file, x);
    if (!file.flush()) {
        std::fprintf(stderr, "octet_cpp: %s cannot be written\n", path.c_str());
        return 1;
    }

    // Reading one element back waits for a GPU.
    const auto wait = [](const Tensor& x) { x.flatten()[0].cpu(); };
    std::printf("%s, N = %lld, F = %lld, medians in microseconds\n", device.c_str(), (long long)N,
                (long long)F);
    std::printf("add2      %10.1f\n", median_us([&] { wait(add2.call(feats, feats)); }));
    std::printf("forward   %10.1f\n", median_us([&] { wait(forward.call(feats, points)); }));
    std::printf("backward  %10.1f\n", median_us([&] {
                    wait(std::get<1>(backward.call(grad_out, feats, points, true, true)));
                }));
    return 0;
}

int main(int count, char** words) {
    if (count < 2 || count > 5) {
        std::fprintf(stderr, "octet_cpp: expected FILE [cpu|cuda] [N] [F], got %d arguments\n",
                     count - 1);
        return 2;
    }
    try {
        return run(words[1], count > 2 ? words[2] : "cpu", count > 3 ? std::atoll(words[3]) : 4096,
                   count > 4 ? std::atoll(words[4]) : 32);
    } catch (const c10::Error& error) {  // what() would add the stack
        std::fprintf(stderr, "octet_cpp: %s\n", error.what_without_backtrace());
        return 1;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "octet_cpp: %s\n", error.what());
        return 1;
    }
}

"""What autograd may do with every operator, as it may with torch's own: a part of the battery."""

import itertools
import math

import pytest
import torch
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from loader.tests.refusals import RefusalTests

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")


class ModeTests(RefusalTests):
    """Tests of an operator whose `small`, `leaves`, `call`, `loss` are those of OperatorTests."""

    grows: dict | None = None  # tensors, by number, and their dimension of any length; all and 0

    def few(self, device="cpu"):
        """As `small`, of so few elements that a derivative by each of them is quick."""
        return self.small(device)

    def test_the_gradient_to_one_tensor_alone(self, variant):
        """The others are constants; batches of gradients are checked too."""
        for i, leaf in enumerate(self.few()):
            tensors = self.few()
            leaf.requires_grad_()

            def function(x, i=i, tensors=tensors):
                return self.form()(*tensors[:i], x, *tensors[i + 1 :], **variant)

            how = {"check_batched_grad": True, **self.gradcheck}
            assert torch.autograd.gradcheck(function, leaf, **how)
            assert torch.autograd.gradgradcheck(function, leaf, **how)

    @pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own
    def test_forward_mode(self, variant, device):
        """Tangents of all tensors and of one alone, over which reverse mode goes, and under it."""

        def function(*tensors):
            return self.form()(*tensors, **variant)

        leaves = [x.requires_grad_() for x in self.few(device)]
        how = {"nondet_tol": 0 if device == "cpu" else 1e-12, **self.gradcheck}
        forward = {"check_forward_ad": True, "check_backward_ad": False}
        forward |= {"check_undefined_grad": False, "check_batched_forward_grad": True}
        assert torch.autograd.gradcheck(function, leaves, **how, **forward)
        for i, leaf in enumerate(leaves):
            tensors = self.few(device)

            def alone(x, i=i, tensors=tensors):
                return function(*tensors[:i], x, *tensors[i + 1 :])

            assert torch.autograd.gradcheck(alone, leaf, **how, **forward)
        over = {"check_fwd_over_rev": True, "check_rev_over_rev": False}
        over["check_undefined_grad"] = False
        assert torch.autograd.gradgradcheck(function, leaves, **how, **over)

    @pytest.mark.filterwarnings("ignore")  # torch's own: what linearize makes is a graph
    def test_hessians_in_every_order(self):
        """Forward and reverse mode over each other and over themselves."""
        tensors, every = tuple(self.few()), tuple(range(len(self.names)))
        f = torch.func
        found = [
            outer(inner(self.loss, every), every)(*tensors)
            for outer, inner in itertools.product((f.jacrev, f.jacfwd), repeat=2)
        ]
        for hessian in found[1:]:
            assert_close(hessian, found[0])
        value, run = f.linearize(self.call, *tensors)
        expected = f.jvp(self.call, tensors, tensors)
        assert_close((value, run(*tensors)), expected)

    def test_batches_of_batches(self):
        """Whichever tensors the inner batch has, and the outer one."""
        count = len(self.names)
        some = [mask for mask in itertools.product((True, False), repeat=count) if any(mask)]
        for inner, outer in itertools.product(some, some):
            seeds = itertools.count()

            args = []
            for i in range(count):
                size = (3,) * outer[i] + (2,) * inner[i]
                each = [self.small(seed=next(seeds))[i] for _ in range(math.prod(size))]
                args.append(torch.stack(each).unflatten(0, size) if size else each[0])
            dims = [tuple(0 if many else None for many in mask) for mask in (inner, outer)]
            ours = torch.vmap(torch.vmap(self.call, dims[0]), dims[1])(*args)
            for o, i in itertools.product(range(3), range(2)):
                chosen = [x[o] if many else x for x, many in zip(args, outer, strict=True)]
                chosen = [x[i] if many else x for x, many in zip(chosen, inner, strict=True)]
                assert_close(ours[o, i], self.call(*chosen))

    @pytest.mark.filterwarnings("ignore:.torch.jit")  # torch's own
    def test_other_lengths_are_not_compiled_anew(self):
        """Twice at most, for one length and for any."""
        from torch._dynamo.testing import CompileCounter  # two seconds, which few runs need

        compiles = CompileCounter()
        torch.compiler.reset()
        run = torch.compile(self.call, backend=compiles, fullgraph=True)
        for n in (2, 3, 5, 8, 13):
            tensors = self.small(dtype=torch.float32)
            grows = dict.fromkeys(range(len(tensors)), 0) if self.grows is None else self.grows
            for i, dim in grows.items():
                tensors[i] = torch.cat([tensors[i]] * n, dim)
            assert_close(run(*tensors), self.call(*tensors))
        assert compiles.frame_count <= 2

    def test_shapes_alone(self):
        """On the meta device: what results and gradients look like."""
        for dtype in (torch.float32, torch.bfloat16):
            found = []
            for device in ("cpu", "meta"):
                leaves = [x.to(device).requires_grad_() for x in self.small(dtype=dtype)]
                out = self.call(*leaves)
                found.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
            for ours, shape in zip(*found, strict=True):
                assert shape.is_meta and shape.shape == ours.shape and shape.dtype == ours.dtype
                assert shape.stride() == ours.stride()

    def test_what_arrives_for_some_gradients_alone(self):
        """The backward's own derivative, where nothing arrives for the other gradients."""
        results = []
        for suffix in ("", "_reference"):
            found = []
            for i in range(len(self.names)):
                leaves = self.leaves()
                out = self.form(suffix)(*leaves, **self.options)
                weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
                weight.requires_grad_()
                grads = torch.autograd.grad(out, leaves, weight, create_graph=True)
                wanted = [weight, *leaves]
                found += torch.autograd.grad(
                    grads[i].square().sum(), wanted, materialize_grads=True
                )
            results.append(found)
        assert_close(*results)

    def test_arguments_that_share_memory(self):
        """Views of one tensor, whose gradient is made of all of theirs."""
        sizes = [x.shape for x in self.small()]
        base = torch.cat([x.flatten() for x in self.small()]).requires_grad_()
        parts = base.split([size.numel() for size in sizes])
        views = [part.view(size) for part, size in zip(parts, sizes, strict=True)]
        leaves = self.leaves()
        expected = torch.autograd.grad(self.loss(*leaves), leaves)
        found = torch.autograd.grad(self.loss(*views), base)[0]
        assert torch.equal(found, torch.cat([x.flatten() for x in expected]))
        if len({*sizes}) == 1:
            whole = torch.autograd.grad(self.loss(*[leaves[0]] * len(sizes)), leaves[0])[0]
            apart = [x.detach().clone().requires_grad_() for x in [leaves[0]] * len(sizes)]
            assert_close(whole, sum(torch.autograd.grad(self.loss(*apart), apart)))

    def test_checkpoints_and_hooks(self):
        """What is kept for the backward passes through torch's hooks, or is computed again."""
        leaves, kept = self.leaves(), []
        expected = torch.autograd.grad(self.loss(*leaves), leaves)
        for reentrant in (False, True):
            again = checkpoint(self.loss, *leaves, use_reentrant=reentrant)
            again.backward()
            assert all(map(torch.equal, [x.grad for x in leaves], expected))
            for leaf in leaves:
                leaf.grad = None

        def pack(x):
            kept.append(x)
            return len(kept) - 1

        with torch.autograd.graph.saved_tensors_hooks(pack, kept.__getitem__):
            value = self.loss(*leaves)
        assert kept
        assert all(map(torch.equal, torch.autograd.grad(value, leaves), expected))

    def test_a_tensor_changed_after_the_forward_is_noticed(self):
        tensors, kept = [x * 1 for x in self.leaves()], []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            self.call(*tensors)
        for x in kept:
            changed = next(y for y in tensors if y.data_ptr() == x.data_ptr())
            out = self.call(*tensors)
            with torch.no_grad():
                changed.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()

    def test_autocast_leaves_dtypes(self, device):
        """The rule of every operator but grid_sample: results are of the first tensor's dtype."""
        tensors = self.small(device, torch.float32)
        expected = self.call(*tensors)
        with torch.autocast(device, dtype=torch.bfloat16):
            assert torch.equal(self.call(*tensors), expected)

    @GPU
    def test_memory(self):
        """Forward and backward take their results, and what is handed over between them."""
        for tensors in self.large("cuda"):
            leaves = [x.requires_grad_(x.is_floating_point()) for x in tensors]
            out = self.call(*leaves)
            if not out.is_floating_point():
                continue
            grad_out = torch.ones_like(out)
            wanted = [x for x in leaves if x.requires_grad]
            torch.autograd.grad(out, wanted, grad_out)
            size = sum(x.numel() * x.element_size() for x in (out, *wanted))
            del out
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            torch.autograd.grad(self.call(*leaves), wanted, grad_out)
            peak = torch.cuda.max_memory_allocated() - before
            assert peak <= 1.01 * size + self.more_memory(tensors) + (1 << 16), (peak, size)

    def test_memory_that_cannot_be_had(self, device):
        """torch's own words, which programs look for that then try again with less."""
        tensors = self.small(device)
        grows = dict.fromkeys(range(len(tensors)), 0) if self.grows is None else self.grows
        tensors = [
            # More than an address has bits for: systems may promise whatever has one.
            x.narrow(grows[i], 0, 1).expand(*x.shape[: grows[i]], 1 << 50, *x.shape[grows[i] + 1 :])
            if i in grows
            else x
            for i, x in enumerate(tensors)
        ]
        words = (
            "^DefaultCPUAllocator: can't allocate memory: you tried to allocate [0-9]{14,} bytes"
            if device == "cpu"
            else "^CUDA out of memory. Tried to allocate [0-9.]+ GiB on cuda:0"
        )
        kind = RuntimeError if device == "cpu" else torch.OutOfMemoryError
        with pytest.raises(kind, match=words):
            self.call(*tensors)

    def more_memory(self, tensors) -> int:
        """Bytes beyond inputs, outputs and gradients, where an operator says that it takes some."""
        return 0

    @GPU
    def test_a_training_step_in_a_cuda_graph(self):
        """Forward, backward and the optimizer's step, captured once, learn as they do uncaptured."""
        results = []
        for captured in (False, True):
            leaves = self.leaves("cuda", torch.float32)
            optimizer = torch.optim.Adam(leaves, lr=1e-2, capturable=True)

            def step(leaves=leaves, optimizer=optimizer):
                optimizer.zero_grad(set_to_none=False)
                self.loss(*leaves).backward()
                optimizer.step()

            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step()
            torch.cuda.current_stream().wait_stream(side)
            if captured:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    step()
                run = graph.replay
            else:
                run = step
            for _ in range(5):
                run()
            results.append([x.detach().clone() for x in leaves])
        assert_close(*results, rtol=1e-4, atol=1e-4)

"""What autograd may do with every operator, as it may with torch's own: a part of the battery."""

import pytest
import torch
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")


class ModeTests:
    """Tests of an operator whose `small`, `leaves`, `call`, `loss` are those of OperatorTests."""

    def test_the_gradient_to_one_tensor_alone(self, variant):
        """The others are constants; batches of gradients are checked too."""
        for i, leaf in enumerate(self.leaves()):
            tensors = self.small()

            def function(x, i=i, tensors=tensors):
                return self.form()(*tensors[:i], x, *tensors[i + 1 :], **variant)

            how = {"check_batched_grad": True, **self.gradcheck}
            assert torch.autograd.gradcheck(function, leaf, **how)
            assert torch.autograd.gradgradcheck(function, leaf, **how)

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

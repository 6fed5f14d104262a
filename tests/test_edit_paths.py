"""Edits are taken in wherever the sources lie."""

from living import NOTE, Living, checkout_of, note_which


def test_an_edit_is_taken_in_under_a_path_that_a_shell_would_misread(tmp_path):
    name = 'it\'s $HOME; & "more"'
    living = Living(checkout_of(tmp_path / "a folder" / "Übung" / name, "square"))
    living("import torch, loader; from loader import square as f; x = torch.arange(4.); f(x)")
    living(NOTE)
    for which in ("first", "second"):
        note_which(living, which) if which == "first" else living.edit(
            "kernels/square_cpu.cpp", '"first"', '"second"'
        )
        assert living("r = loader.reload(); print(r.ok or r, note())") == f"True {which}"
    living.end()

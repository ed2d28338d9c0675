"""Changes of a kernel that it must not survive, as edits of its instructions (see ptx.Edit)."""

from __future__ import annotations

from .ptx import Edit, Instruction

SYNCHRONISATION = ("bar", "barrier", "mbarrier", "fence", "wgmma", "griddepcontrol")
OF_COPIES = ("mbarrier", "wait_all", "wait_group")  # of cp.async


def without(name: str) -> Edit:
    """Leaves out what a mark names: its barriers, fences, arrivals and waits, wherever it was inlined."""

    def edit(item: Instruction, mark: str) -> str:
        of_copies = item.parts[:2] == ("cp", "async") and item.parts[2] in OF_COPIES
        if mark != name or not (item.parts[0] in SYNCHRONISATION or of_copies):
            return item.text
        if {"try_wait", "test_wait"} & set(item.parts):
            return f"setp.eq.u32 {item.operands[0].name}, 0, 0;"
        if "red" in item.parts:  # each thread is told its own vote
            return f"mov.pred {item.operands[0].name}, {item.operands[-1].name};"
        return ""

    return edit


def other_parity(wait: Instruction) -> Edit:
    """One wait for an mbarrier waits for the wrong half of its phases."""

    def edit(item: Instruction, _: str) -> str:
        if item.text != wait.text:
            return item.text
        until = item.text.rsplit(",", 1)[0]
        return f"{{ .reg .b32 flipped; xor.b32 flipped, {item.operands[2].name}, 1; {until}, flipped; }}"

    return edit


def far_behind(load: Instruction) -> Edit:
    """One load from memory reads where nothing is."""
    return lambda item, _: item.text if item.text != load.text else f"{item.text[:-1]}+{1 << 22}];"

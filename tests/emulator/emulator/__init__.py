"""Runs compiled kernels (PTX for sm_90a) on numpy: what they do is tested where there is no GPU.

It executes what nvcc made of them, instruction by instruction, for every thread. What hardware does behind a program's
back (TMA copies, cp.async, st.async, WGMMA) happens at times that a seed draws: at once, as late as the program's waits
allow, or in between; so do the warps of a CTA take turns. A mistake of the kernel raises `EmulationError` and names
instruction, source line, warp and lanes:

- an access out of bounds of its tensor, or misaligned;
- shared memory read that nobody has written, or read or written while a copy still fills it;
- registers of a WGMMA in flight touched, or used without wgmma.fence before it;
- TMA into shared memory written without fence.proxy.async since;
- a WGMMA that reads what a warp stored, or brought by cp.async, where neither that warp nor the reading one has fenced
  since: it gets NaN, as tails of a tile are read and thrown away. The reader's fence counts for writes that it knew
  of: by a barrier, or from warps that knew, through one;
- misuse of mbarriers, named barriers and the cluster's, shared memory of a CTA that has ended, operands that differ
  where a warp must agree, and deadlock.

A warp knows what any of its lanes knows, and a fence is all lanes'. Its cp.async arrive in the order of the program.

An unknown instruction raises when the kernel is loaded; the emulator knows all that the project's kernels use.

Read in this order: ptx.py (text to instructions), machine.py (CTAs, warps, barriers, copies in flight, who runs next),
instructions.py and operations.py (what each instruction does, alone or with others), tensor_cores.py (WGMMA).
shared.py, memory.py, lanes.py and formats.py hold what these need; faults.py plants faults in a kernel. Nothing here
knows the project's kernels: ../kernels.py compiles csrc and launches what the library launches.

It cannot see: registers, as PTX has as many as it likes (spills, and where ptxas reuses one too early); time and
occupancy; memory ordering weaker than program order, as fences between threads do nothing here; races between CTAs,
which run one after another (the CTAs of a cluster take turns); interleavings finer than straight-line code. WGMMA sums
in float32, where hardware keeps fewer bits of e4m3 products; ex2, lg2 and divisions are exact here.
"""

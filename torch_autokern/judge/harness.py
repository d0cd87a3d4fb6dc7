"""A C++ `main` around a candidate: its tensors as heap blocks of their own, its plan's steps, inputs from stdin.

The program is built with a sanitizer and run in the box, with neither Python nor torch in it. Blocks have exactly the bytes of
their tensors, so that one more is in the sanitizer's red zone. Steps run in pieces of the plan's grain, the last piece first;
with two threads, in halves side by side. `program canary` makes the mistake that its sanitizer must see.
"""

from __future__ import annotations

from torch_autokern.judge.memory import span_elements
from torch_autokern.judge.workspaces import exposed
from torch_autokern.ops.spec import itemsize
from torch_autokern.runtime.plan import CpuStep, InputArg, LaunchPlan, OutputArg, entries
from torch_autokern.store.key import KernelKey, TensorKey

DONE = b"every trial ran"

_MAIN = """
static void* run_half(void* argument) {
  const Piece& p = *static_cast<Piece*>(argument);
  p.entry(p.begin, p.end, p.pointers);
  return nullptr;
}

static void run_step(Entry entry, int64_t range, int64_t grain, void* const* pointers) {
  if (THREADS == 1) {
    for (int64_t begin = (range - 1) / grain * grain; begin >= 0; begin -= grain)
      entry(begin, begin + grain < range ? begin + grain : range, pointers);
    return;
  }
  const int64_t half = range / 2 > grain ? (range + 1) / 2 : grain;
  Piece pieces[2] = {{entry, 0, half < range ? half : range, pointers}, {entry, half, range, pointers}};
  pthread_t thread;
  const bool both = half < range && pthread_create(&thread, nullptr, run_half, &pieces[1]) == 0;
  run_half(&pieces[0]);
  if (both) pthread_join(thread, nullptr);
}

static int shared = 0;
static void* race(void*) {
  for (int i = 0; i < 1000; ++i) ++shared;
  return nullptr;
}

// The mistakes that the address, undefined-behaviour and thread sanitizers must see, in this order.
static int canary() {
  volatile int size = 16;
  if (THREADS == 1) {
    if (CANARY == 0) {
      volatile char* block = static_cast<char*>(std::malloc(size));
      return block[size];
    }
    volatile int most = 2147483647;
    return most + size;
  }
  pthread_t thread;
  if (pthread_create(&thread, nullptr, race, nullptr)) return 0;
  race(nullptr);
  pthread_join(thread, nullptr);
  return shared;
}

// Without the leak check at exit: it stops every thread through /proc, which the box hides.
static void done() {
  std::puts("every trial ran");
  std::fflush(stdout);
  std::_Exit(0);
}

int main(int count, char**) {
  if (count > 1) return canary() == 1 ? 3 : 0;
  for (;;) {
    void* buffer[BUFFERS + 1] = {};
    for (int i = 0; i < BUFFERS; ++i) {
      if (!kSize[i]) continue;
      buffer[i] = std::malloc(kSize[i]);
      if (i < INPUTS && std::fread(buffer[i], 1, kSize[i], stdin) != kSize[i]) done();
      if (i >= INPUTS) std::memset(buffer[i], kFill[i], kSize[i]);
    }
    run(buffer);
    for (int i = 0; i < BUFFERS; ++i) std::free(buffer[i]);
  }
}
"""


def harness(plan: LaunchPlan, key: KernelKey, *, threads: int, canary: int) -> str:
    """The C++ text for one key. `threads` is 1 or 2; `canary` 0 overruns a block, 1 overflows an integer (two threads race)."""
    steps, whole = exposed(plan, key)
    inputs = len(whole.tensors)
    layouts = (*whole.tensors, *whole.outputs)
    zeroed = {inputs + len(key.outputs) + i for i, workspace in enumerate(plan.workspaces) if workspace.zeroed}
    sizes = ", ".join(f"{0 if t is None else size_bytes(t)}u" for t in layouts)
    fills = ", ".join("0" if i in zeroed else "0xC1" for i in range(len(layouts)))
    declared = "".join(f'extern "C" void {name}(int64_t, int64_t, void* const*);\n' for name in entries(plan))
    body = "".join(_step(step, inputs) for step in steps.steps if isinstance(step, CpuStep))
    return (
        "#include <pthread.h>\n#include <cstdint>\n#include <cstdio>\n#include <cstdlib>\n#include <cstring>\n"
        f"{declared}"
        "using Entry = void (*)(int64_t, int64_t, void* const*);\n"
        "struct Piece { Entry entry; int64_t begin, end; void* const* pointers; };\n"
        f"static constexpr int THREADS = {threads}, CANARY = {canary}, BUFFERS = {len(layouts)}, INPUTS = {inputs};\n"
        f"static const size_t kSize[] = {{{sizes}}};\nstatic const int kFill[] = {{{fills}}};\n"
        "static void run_step(Entry, int64_t, int64_t, void* const*);\n"
        f"static void run(void* const* buffer) {{\n{body}}}\n{_MAIN}"
    )


def size_bytes(layout: TensorKey) -> int:
    """Bytes from the first element to the last."""
    return span_elements(layout.sizes, layout.strides) * itemsize(layout.dtype)


def _step(step: CpuStep, inputs: int) -> str:
    words = []
    for arg in step.args:
        assert isinstance(arg, InputArg | OutputArg)  # workspaces are results here
        place = arg.index + (inputs if isinstance(arg, OutputArg) else 0)
        words.append(f"buffer[{place}] ? static_cast<char*>(buffer[{place}]) + {arg.offset_bytes} : nullptr")
    pointers = ", ".join(words) or "nullptr"
    return f"  {{ void* const p[] = {{{pointers}}}; run_step({step.entry}, {step.range}, {step.grain}, p); }}\n"

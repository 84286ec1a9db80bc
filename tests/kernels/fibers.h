// The threads of a block as fibers of one CPU thread, their barriers, and the blocks that are under way at a time.
//
// A warp runs until all its lanes wait for the block; then another one, at random, is next. A block runs to its end but for its atomics:
// before and after each of them, any of RESIDENT blocks may go on.
#pragma once
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include "emulator.h"

Index threadIdx, blockIdx, blockDim, gridDim;

// A fiber's registers live on its own stack while another one runs.
#if defined(__x86_64__) && defined(__linux__)
asm(R"(
  .text
  .type switch_stack, @function
switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size switch_stack, .-switch_stack
)");
extern "C" void switch_stack(void **saved, void *next) __attribute__((visibility("hidden")));
typedef void *Context;
inline void switch_context(Context &from, Context &to) { switch_stack(&from, to); }
inline void make_context(Context &c, char *stack, size_t size, void (*entry)()) {
  void **top = (void **)(stack + size) - 2;   // entry starts as if called: its stack pointer is 8 below a multiple of 16
  *top = (void *)entry;
  c = top - 6;   // the registers, of which none matters
}
#else
typedef ucontext_t Context;
inline void switch_context(Context &from, Context &to) { swapcontext(&from, &to); }
inline void make_context(Context &c, char *stack, size_t size, void (*entry)()) {
  getcontext(&c);
  c.uc_stack.ss_sp = stack;
  c.uc_stack.ss_size = size;
  makecontext(&c, entry, 0);
}
#endif

namespace emulator {

constexpr u32 MAX_THREADS = 1024, MAX_WARPS = MAX_THREADS / 32, SHARED_LIMIT = 227 * 1024, RESIDENT = 4, MAX_COPIES = 64;
constexpr size_t STACK_BYTES = 128 * 1024;

// Who touched a word of shared memory last, and when: barriers of the block and (within a warp) of the warp part accesses in time.
struct Touch {
  int thread;   // -1: nobody, -2: several lanes of the warp since its last barrier
  u32 phase;
  u32 warps;    // as a set: those that have read in this phase
  u32 warp_phase[MAX_WARPS], clock[MAX_WARPS];   // at the last touch of each of them
};
// Of a tensor core, by k: a's element of row g, twice, and that of row g + 8, twice; b's of each column.
typedef float Four __attribute__((vector_size(16)));
struct Operands {
  Four a[16][8];
  float b[16][8];
};
struct Warp {
  u32 arrived, meetings, phase;
  const char *what;
  u32 words[2][32];                             // by this collective and by the last one, which slow lanes may still read
  Operands operands[2];
};
// Where a lane has touched shared memory since its warp's last meeting, one access after the other.
struct Places {
  u32 phase, meetings, count;
  u32 at[64];
};
struct Copy { u32 address; const u16 *p; bool valid; };
enum State { READY, AT_BARRIER, AT_NAMED, DONE };
// A barrier of some warps: threads that have come, which of them wait, and when each warp came.
struct Named {
  u32 arrived, warps, times[MAX_WARPS];
};
struct Block {
  u32 index;
  Context contexts[MAX_THREADS];
  State states[MAX_THREADS];
  Warp warps[MAX_WARPS];
  u32 live, arrived, phase;   // threads that have not returned; those at the barrier; barriers passed
  u32 clock, seen[MAX_WARPS][MAX_WARPS];   // arrivals at named barriers; the last one of each warp that a warp knows of
  Named named[16];
  int waits_at[MAX_THREADS];
  bool is_any;                // false between calls of __syncthreads_or
  bool is_paused;
  u32 next;                   // the thread that goes on when the block does
  Touch writes[SHARED_LIMIT / 4], reads[SHARED_LIMIT / 4];
  unsigned char shared_memory[SHARED_LIMIT] __attribute__((aligned(16)));
  Copy copies[MAX_THREADS][MAX_COPIES];   // that cp.async has under way
  int copy_count[MAX_THREADS];
  Places places[MAX_THREADS];
  char *stacks;
};
static Block resident[RESIDENT];
static Block *block;   // that runs
static Context scheduler;
static void (*body)();
static u32 random_state, shared_size, conflicts;
static char message[512];
static bool failed;

static u32 random_below(u32 n) {
  random_state = random_state * 1664525u + 1013904223u;
  return (u32)((u64)random_state * n >> 32);
}

__attribute__((format(printf, 1, 2), noinline)) static void fail(const char *format, ...) {
  char text[400];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  snprintf(message, sizeof message, "block %u, thread %u: %s", blockIdx.x, threadIdx.x, text);
  failed = true;
  switch_context(block->contexts[threadIdx.x], scheduler);   // for good
  abort();
}

// ---- Scheduling
inline void switch_to(u32 thread) {
  const u32 from = threadIdx.x;
  if (thread == from) return;
  threadIdx.x = thread;
  switch_context(block->contexts[from], block->contexts[thread]);
}

// A lane of this warp, else of one at random, that can go on; without any the block has come to its end.
static void step_aside() {
  const u32 me = threadIdx.x, first = me & ~31u;
  for (u32 i = 1; i <= 32; i++) {
    const u32 lane = first + (me + i) % 32;
    if (block->states[lane] == READY) return switch_to(lane);
  }
  const u32 start = random_below(blockDim.x / 32) * 32 + random_below(32);
  for (u32 i = 0; i < blockDim.x; i++) {
    const u32 thread = (start + i) % blockDim.x;
    if (block->states[thread] == READY) return switch_to(thread);
  }
  switch_context(block->contexts[me], scheduler);
}

void others_may_run() {
  if (random_below(2)) return;
  block->is_paused = true, block->next = threadIdx.x;
  switch_context(block->contexts[threadIdx.x], scheduler);
}

inline Warp &warp() { return block->warps[threadIdx.x / 32]; }
static void meet_warp(const char *what) {
  Warp &w = warp();
  if (w.arrived == 0) w.what = what;
  if (w.what != what) fail("lanes of one warp are at %s and at %s", w.what, what);
  const u32 meeting = w.meetings;
  if (++w.arrived == 32) {
    w.arrived = 0;
    w.meetings++;
    return;
  }
  step_aside();
  if (w.meetings == meeting) fail("%s waits for lanes that do not come", what);
}

static void release_block() {
  block->arrived = 0;
  block->phase++;
  for (u32 i = 0; i < blockDim.x; i++)
    if (block->states[i] == AT_BARRIER) block->states[i] = READY;
}
static void meet_block() {
  block->states[threadIdx.x] = AT_BARRIER;
  if (++block->arrived == block->live) {
    release_block();
    const u32 next = random_below(blockDim.x);
    if (block->states[next] == READY) switch_to(next);
  } else {
    step_aside();
  }
}

// Waits at a named barrier of `threads` for the last one to come.
static void meet_named(u32 id, u32 threads) {
  Named &named = block->named[id];
  const u32 me = threadIdx.x;
  named.times[me / 32] = ++block->clock;
  named.warps |= 1u << me / 32;
  block->states[me] = AT_NAMED, block->waits_at[me] = id;
  if (++named.arrived > threads) fail("more than %u threads come to barrier %u", threads, id);
  if (named.arrived < threads) return step_aside();
  for (u32 i = 0; i < blockDim.x; i++) {
    if (block->states[i] != AT_NAMED || block->waits_at[i] != (int)id) continue;
    for (u32 w = 0; w < MAX_WARPS; w++)
      if (named.warps >> w & 1) block->seen[i / 32][w] = named.times[w];
    block->states[i] = READY;
  }
  for (u32 w = 0; w < MAX_WARPS; w++)   // it parts the accesses of a warp's own lanes, too
    if (named.warps >> w & 1) block->warps[w].phase = ++block->warps[w].meetings;
  named.arrived = named.warps = 0;
}

static void run_thread() {
  body();
  block->states[threadIdx.x] = DONE;
  block->live--;
  if (block->live && block->arrived == block->live) release_block();   // a barrier does not wait for threads that returned
  step_aside();
  abort();
}

// ---- Faults
// An access that no check saw, to memory that is not there: the thread's error, and not the end of the process.
static bool in_fiber;
static pthread_t launching;
static void *fault_address;
static char handler_stack[64 * 1024], last_stack[64 * 1024] __attribute__((aligned(16)));
struct Faults {
  struct sigaction segv, bus;
  stack_t stack;
  Faults() {
    struct sigaction action = {};
    action.sa_sigaction = [](int signal, siginfo_t *info, void *context) {
#if defined(__x86_64__) && defined(__linux__)
      if (in_fiber && pthread_equal(pthread_self(), launching)) {
        greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
        fault_address = info->si_addr;
        registers[REG_RIP] = (greg_t)+[] { fail("a fault at address %p", fault_address); };
        registers[REG_RSP] = (greg_t)(last_stack + sizeof last_stack - 8);
        return;
      }
#endif
      struct sigaction standard = {};   // happens again, and is no fiber's
      standard.sa_handler = SIG_DFL;
      sigaction(signal, &standard, nullptr);
    };
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    stack_t other = {};
    other.ss_sp = handler_stack, other.ss_size = sizeof handler_stack;
    sigaltstack(&other, &stack);
    sigaction(SIGSEGV, &action, &segv), sigaction(SIGBUS, &action, &bus);
    launching = pthread_self();
  }
  ~Faults() {
    sigaction(SIGSEGV, &segv, nullptr), sigaction(SIGBUS, &bus, nullptr);
    sigaltstack(&stack, nullptr);
  }
};

// ---- Blocks
static bool start_block(Block &b, u32 index) {
  if (!b.stacks) {
    void *stacks = mmap(nullptr, MAX_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) return false;
    b.stacks = (char *)stacks;
  }
  b.index = index;
  memset(b.shared_memory, 0xff, shared_size);   // NaN in every format
  for (u32 i = 0; i < (shared_size + 3) / 4; i++) b.writes[i].thread = b.reads[i].thread = -1;
  for (u32 i = 0; i < blockDim.x / 32; i++) b.warps[i].arrived = b.warps[i].meetings = b.warps[i].phase = 0;
  b.clock = 0;
  memset(b.seen, 0, sizeof b.seen), memset(b.named, 0, sizeof b.named);
  b.live = blockDim.x, b.arrived = b.phase = 0, b.is_any = false;
  for (u32 i = 0; i < blockDim.x; i++) {
    b.states[i] = READY, b.copy_count[i] = 0, b.places[i].phase = ~0u;
    char *stack = b.stacks + i * STACK_BYTES;
    memset(stack, 0xcd, 16);
    make_context(b.contexts[i], stack, STACK_BYTES, run_thread);
  }
  b.next = random_below(blockDim.x);
  return true;
}

// Until it has come to its end (true), or lets others go on.
static bool run(Block &b) {
  block = &b, b.is_paused = false;
  blockIdx = {b.index, 0, 0}, threadIdx = {b.next, 0, 0};
  in_fiber = true;
  switch_context(scheduler, b.contexts[b.next]);
  in_fiber = false;
  if (failed || b.is_paused) return false;
  for (u32 i = 0; i < blockDim.x; i++) {
    const bool intact = b.stacks[i * STACK_BYTES] == (char)0xcd;
    if (b.states[i] == DONE && intact) continue;
    failed = true;
    snprintf(message, sizeof message, "block %u, thread %u: %s", b.index, i,
             intact ? "__syncthreads waits for threads that do not come" : "its stack is too small");
    return false;
  }
  return true;
}

// All blocks in random order, some of them at a time. Returns null, or what went wrong.
static const char *run_blocks(void (*thread)(), u32 blocks, u32 threads) {
  body = thread, failed = false;
  gridDim = {blocks, 1, 1}, blockDim = {threads, 1, 1};
  Faults faults;
  u32 *order = (u32 *)malloc(blocks * sizeof(u32)), started = 0, running = 0;
  for (u32 i = 0; i < blocks; i++) {
    const u32 j = random_below(i + 1);
    order[i] = order[j], order[j] = i;
  }
  Block *under_way[RESIDENT];
  for (u32 i = 0; i < RESIDENT; i++) under_way[i] = &resident[i];
  while (!failed && (running || started < blocks)) {
    const u32 chosen = random_below(running + (running < RESIDENT && started < blocks));
    if (chosen == running) {
      if (!start_block(*under_way[running++], order[started++])) return free(order), "no memory for the stacks";
    }
    Block *const b = under_way[chosen];
    if (run(*b)) under_way[chosen] = under_way[--running], under_way[running] = b;
  }
  free(order);
  return failed ? message : nullptr;
}

}  // namespace emulator

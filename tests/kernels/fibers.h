// The threads of a block as fibers of one CPU thread, their barriers, and the checks of their memory accesses.
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

struct Index { unsigned x, y, z; };
static Index threadIdx, blockIdx, blockDim, gridDim;

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

constexpr u32 MAX_THREADS = 1024, SHARED_START = 1024, SHARED_LIMIT = 100 * 1024;
constexpr size_t STACK_BYTES = 128 * 1024;
struct Memory { u64 start, end; };

// ---- State of the launch
enum State { READY, AT_BARRIER, DONE };
static Context scheduler, contexts[MAX_THREADS];
static State states[MAX_THREADS];
struct Warp { u32 arrived, meetings, phase; const char *what; };
static Warp warps[MAX_THREADS / 32];
static u32 live, arrived, phase;   // threads that have not returned; those at the barrier; barriers passed
static char *stacks;
static void (*body)();
static const Memory *memories;
static int memory_count;
static u32 random_state;
static char message[512];
static bool failed;

inline u32 random_below(u32 n) {
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
  switch_context(contexts[threadIdx.x], scheduler);   // for good
  abort();
}

// ---- Scheduling
inline void switch_to(u32 thread) {
  const u32 from = threadIdx.x;
  if (thread == from) return;
  threadIdx.x = thread;
  switch_context(contexts[from], contexts[thread]);
}

// A lane of this warp, else of one at random, that can go on; without any the block has come to its end.
static void step_aside() {
  const u32 me = threadIdx.x, first = me & ~31u;
  for (u32 i = 1; i <= 32; i++) {
    const u32 lane = first + (me + i) % 32;
    if (states[lane] == READY) return switch_to(lane);
  }
  const u32 start = random_below(blockDim.x / 32) * 32 + random_below(32);
  for (u32 i = 0; i < blockDim.x; i++) {
    const u32 thread = (start + i) % blockDim.x;
    if (states[thread] == READY) return switch_to(thread);
  }
  switch_context(contexts[me], scheduler);
}

inline void meet_warp(const char *what) {
  Warp &w = warps[threadIdx.x / 32];
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
inline u32 meeting_number() { return warps[threadIdx.x / 32].meetings; }
inline void order_warp() { warps[threadIdx.x / 32].phase = warps[threadIdx.x / 32].meetings; }

static void release_block() {
  arrived = 0;
  phase++;
  for (u32 i = 0; i < blockDim.x; i++)
    if (states[i] == AT_BARRIER) states[i] = READY;
}
inline void meet_block() {
  states[threadIdx.x] = AT_BARRIER;
  if (++arrived == live) {
    release_block();
    const u32 next = random_below(blockDim.x);
    if (states[next] == READY) switch_to(next);
  } else {
    step_aside();
  }
}

static void run_thread() {
  body();
  states[threadIdx.x] = DONE;
  live--;
  if (live && arrived == live) release_block();   // a barrier does not wait for threads that returned
  step_aside();
  abort();
}

// ---- Memory
static void check_global(const void *p, size_t bytes, size_t alignment) {
  static int last = 0;   // tensor, which is likely to be touched again
  const u64 address = (u64)p;
  if (address % alignment) fail("global address %p is not aligned to %zu bytes", p, alignment);
  if (last < memory_count && address >= memories[last].start && address + bytes <= memories[last].end) return;
  for (last = 0; last < memory_count; last++)
    if (address >= memories[last].start && address + bytes <= memories[last].end) return;
  fail("%zu bytes of global memory at %p belong to no tensor", bytes, p);
}

// Who touched a word of shared memory last, and when: barriers of the block and (within a warp) of the warp part accesses in time.
struct Touch {
  int thread;   // -1: nobody, -2: several lanes of the warp since its last barrier
  u32 phase, warp_phase;
  u32 warps;    // as a set: those that have read in this phase
};
static Touch writes[SHARED_LIMIT / 4], reads[SHARED_LIMIT / 4];
static unsigned char shared_memory[SHARED_LIMIT] __attribute__((aligned(16)));
static u32 shared_size;

inline bool clashes(const Touch &touch, u32 me) {
  if (touch.thread == -1 || touch.phase != phase || touch.thread == (int)me) return false;
  if (touch.warps & ~(1u << me / 32)) return true;
  return touch.warp_phase == warps[me / 32].phase;
}
inline void record(Touch &touch, u32 me) {
  const u32 mine = 1u << me / 32;
  const bool recent = touch.thread != -1 && touch.phase == phase;
  const bool together = recent && touch.thread != (int)me && (touch.warps & mine) && touch.warp_phase == warps[me / 32].phase;
  touch = {together ? -2 : (int)me, phase, warps[me / 32].phase, recent ? touch.warps | mine : mine};
}
static unsigned char *check_shared(u32 address, u32 bytes, bool write) {
  const u32 at = address - SHARED_START;
  if (address < SHARED_START || at + bytes > shared_size)
    fail("%u bytes of shared memory at %d, of %u", bytes, (int)at, shared_size);
  if (at % bytes) fail("shared memory at %u is not aligned to %u bytes", at, bytes);
  const u32 me = threadIdx.x;
  for (u32 word = at / 4; word <= (at + bytes - 1) / 4; word++) {
    if (clashes(writes[word], me)) fail("race: shared memory at %u was written by thread %d", word * 4, writes[word].thread);
    if (write && clashes(reads[word], me)) fail("race: shared memory at %u is still read by thread %d", word * 4, reads[word].thread);
    record(write ? writes[word] : reads[word], me);
  }
  return shared_memory + at;
}

// ---- Faults
// An access that the checks above did not see, to memory that is not there: the thread's error, and not the end of the process.
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

// ---- A launch: its blocks one after the other, in random order
static void run_block() {
  memset(shared_memory, 0xff, shared_size);   // NaN in every format
  for (u32 i = 0; i < (shared_size + 3) / 4; i++) writes[i].thread = reads[i].thread = -1;
  memset(warps, 0, sizeof warps);
  live = blockDim.x, arrived = phase = 0;
  for (u32 i = 0; i < blockDim.x; i++) {
    states[i] = READY;
    char *stack = stacks + i * STACK_BYTES;
    memset(stack, 0xcd, 16);
    make_context(contexts[i], stack, STACK_BYTES, run_thread);
  }
  threadIdx = {random_below(blockDim.x), 0, 0};
  in_fiber = true;
  switch_context(scheduler, contexts[threadIdx.x]);
  in_fiber = false;
  for (u32 i = 0; i < blockDim.x && !failed; i++) {
    threadIdx.x = i;
    const bool intact = stacks[i * STACK_BYTES] == (char)0xcd;
    if (states[i] == DONE && intact) continue;
    failed = true;
    snprintf(message, sizeof message, "block %u, thread %u: %s", blockIdx.x, i,
             intact ? "__syncthreads waits for threads that do not come" : "its stack is too small");
  }
}

static const char *launch(void (*thread)(), u32 blocks, u32 threads, u32 shared_bytes, const Memory *given, int count, u32 seed) {
  if (threads % 32 || threads > MAX_THREADS) return "threads must be a multiple of 32, at most 1024";
  if (shared_bytes > SHARED_LIMIT) return "more shared memory than a block may have";
  if (!stacks) stacks = (char *)mmap(nullptr, MAX_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == (char *)MAP_FAILED) return stacks = nullptr, "no memory for the stacks";
  body = thread, memories = given, memory_count = count, random_state = seed, failed = false, shared_size = shared_bytes;
  gridDim = {blocks, 1, 1}, blockDim = {threads, 1, 1};
  Faults faults;
  u32 *order = (u32 *)malloc(blocks * sizeof(u32));
  for (u32 i = 0; i < blocks; i++) {
    const u32 j = random_below(i + 1);
    order[i] = order[j], order[j] = i;
  }
  for (u32 i = 0; i < blocks && !failed; i++) {
    blockIdx = {order[i], 0, 0};
    run_block();
  }
  free(order);
  return failed ? message : nullptr;
}

}  // namespace emulator

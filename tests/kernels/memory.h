// The checks of every access to global and shared memory.
#pragma once
#include "fibers.h"

namespace emulator {

// ---- Global memory
struct Memory { u64 start, end; };
static const Memory *memories;
static int memory_count;
static bool rows_overlap;   // outputs may: nothing is said of what several blocks write

// What this launch has done with each pair of bytes (nothing is noted of single ones), in pages that are found by their address and count for one launch.
constexpr u32 PAGE_BITS = 12, PAGE_ENTRIES = 1 << (PAGE_BITS - 1), READ_ONLY_BIT = 1u << 31, BY_ATOMICS = READ_ONLY_BIT - 1, BY_SEVERAL = BY_ATOMICS - 1;
struct Page {
  u64 number;
  u32 launch;
  u32 entries[PAGE_ENTRIES];   // READ_ONLY_BIT: read as memory that nobody writes; the rest: 1 + the block that wrote, or how blocks did together
};
static Page **table;
static u32 table_size, page_count, launch_number;

static Page **slot_of(u64 number) {
  u32 at = (u32)(number * 0x9e3779b97f4a7c15ull >> 32) & (table_size - 1);
  while (table[at] && table[at]->number != number) at = (at + 1) & (table_size - 1);
  return table + at;
}
static Page &page_of(u64 number) {
  static Page *last;
  if (last && last->number == number && last->launch == launch_number) return *last;
  if (2 * (page_count + 1) > table_size) {
    Page **const old = table;
    const u32 size = table_size;
    table_size = size ? 2 * size : 4096;
    table = (Page **)calloc(table_size, sizeof(Page *));
    for (u32 i = 0; i < size; i++) if (old[i]) *slot_of(old[i]->number) = old[i];
    free(old);
  }
  Page **const slot = slot_of(number);
  if (!*slot) {
    *slot = (Page *)malloc(sizeof(Page));
    (*slot)->number = number, (*slot)->launch = launch_number - 1;
    page_count++;
  }
  last = *slot;
  if (last->launch != launch_number) memset(last->entries, 0, sizeof last->entries);
  last->launch = launch_number;
  return *last;
}

static void check_bounds(u64 address, u32 bytes) {
  static int last = 0;   // tensor, which is likely to be touched again
  if (last < memory_count && address >= memories[last].start && address + bytes <= memories[last].end) return;
  for (last = 0; last < memory_count; last++)
    if (address >= memories[last].start && address + bytes <= memories[last].end) return;
  fail("%u bytes of global memory at %p belong to no tensor", bytes, (void *)address);
}

// Of all blocks together: what one writes others read as fresh, write with the same bits or leave alone; ld.global.nc reads what nobody writes.
static void check_blocks(u64 address, u32 bytes, Access access, bool is_same) {
  u32 *const entries = page_of(address >> PAGE_BITS).entries + (address >> 1) % PAGE_ENTRIES, mine = blockIdx.x + 1;
  for (u32 i = 0; i < (bytes + 1) / 2; i++) {
    const u32 writer = entries[i] & ~READ_ONLY_BIT;
    const bool by_others = writer && writer != mine && writer != BY_SEVERAL;
    const char *const by = writer == BY_ATOMICS ? "atomics" : by_others ? "another block" : "this block";
    if (access == READ_ONLY) {
      if (writer) fail("ld.global.nc at %p, which %s wrote in this launch", (void *)address, by);
      entries[i] |= READ_ONLY_BIT;
    } else if (access == READ) {
      if (by_others) fail("a load at %p through L1, which may hold what was there before %s wrote", (void *)address, by);
    } else if (access != FRESH) {
      if (entries[i] & READ_ONLY_BIT) fail("a write at %p, which ld.global.nc reads in this launch", (void *)address);
      const u32 next = access == ATOMIC ? BY_ATOMICS : writer && writer != mine ? BY_SEVERAL : mine;
      if (writer && writer != next && !is_same) fail("a write at %p of something else than %s wrote", (void *)address, by);
      entries[i] = next;
    }
  }
}

void *global(const void *p, u32 bytes, u32 alignment, Access access, const void *written) {
  const u64 address = (u64)p;
  if (address % alignment) fail("global address %p is not aligned to %u bytes", p, alignment);
  check_bounds(address, bytes);
  if (bytes > 1) check_blocks(address, bytes, access, rows_overlap || (written && !memcmp(p, written, bytes)));
  return (void *)p;
}

// ---- Shared memory
inline bool clashes(const Touch &touch, u32 me) {
  if (touch.thread == -1 || touch.phase != block->phase || touch.thread == (int)me) return false;
  for (u32 w = 0, others = touch.warps & ~(1u << me / 32); others >> w; w++)
    if (others >> w & 1 && block->seen[me / 32][w] <= touch.clock[w]) return true;
  if (!(touch.warps >> me / 32 & 1)) return false;
  return touch.warp_phase[me / 32] == block->warps[me / 32].phase;
}
inline void record(Touch &touch, u32 me) {
  const u32 mine = 1u << me / 32, phase = block->phase, warp_phase = block->warps[me / 32].phase;
  const bool recent = touch.thread != -1 && touch.phase == phase;
  const bool together =
      recent && touch.thread != (int)me && (touch.warps & mine) && touch.warp_phase[me / 32] == warp_phase;
  touch.thread = together ? -2 : (int)me, touch.phase = phase, touch.warps = recent ? touch.warps | mine : mine;
  touch.warp_phase[me / 32] = warp_phase, touch.clock[me / 32] = block->clock;
}
void *shared(u32 address, u32 bytes, bool is_write) {
  const u32 at = address - SHARED_START;
  if (address < SHARED_START || at + bytes > shared_size)
    fail("%u bytes of shared memory at %d, of %u", bytes, (int)at, shared_size);
  if (at % bytes) fail("shared memory at %u is not aligned to %u bytes", at, bytes);
  const u32 me = threadIdx.x;
  for (u32 word = at / 4; word <= (at + bytes - 1) / 4; word++) {
    Touch &write = block->writes[word], &read = block->reads[word];
    if (clashes(write, me)) fail("race: shared memory at %u was written by thread %d", word * 4, write.thread);
    if (is_write && clashes(read, me)) fail("race: shared memory at %u is still read by thread %d", word * 4, read.thread);
    record(is_write ? write : read, me);
  }
  return block->shared_memory + at;
}

// Counts what one more lane costs: accesses of as many lanes as have 128 bytes together, each its first one, its second one and so on since the
// warp met, are one if they lie in different banks. Lanes that are elsewhere meanwhile make the count wrong.
void count_conflicts(u32 address, u32 bytes) {
  const u32 lanes = 128 / bytes, first = threadIdx.x / lanes * lanes, at = address / bytes, phase = block->phase, meetings = warp().meetings;
  Places &mine = block->places[threadIdx.x];
  if (mine.phase != phase || mine.meetings != meetings) mine = {phase, meetings, 0};
  const u32 n = mine.count++;
  if (n >= sizeof mine.at / 4) return;
  mine.at[n] = at;
  for (u32 i = first; i < first + lanes; i++) {
    const Places &other = block->places[i];
    if (i == threadIdx.x || other.phase != phase || other.meetings != meetings || other.count <= n || other.at[n] == at) continue;
    if ((other.at[n] ^ at) % lanes == 0) {
      conflicts++;
      return;
    }
  }
}

// What cp.async brings is there after the wait, and NaN before.
void copy_async(u32 address, const u16 *p, bool valid) {
  int &n = block->copy_count[threadIdx.x];
  if (n == MAX_COPIES) fail("more than %u copies in flight", MAX_COPIES);
  *(uint4 *)shared(address, 16, true) = make_uint4(~0u, ~0u, ~0u, ~0u);
  block->copies[threadIdx.x][n++] = {address, p, valid};
}
void copy_async_wait() {
  int &n = block->copy_count[threadIdx.x];
  for (int i = 0; i < n; i++) {
    const Copy &copy = block->copies[threadIdx.x][i];
    shared_write(copy.address, copy.valid ? global_load((const uint4 *)copy.p) : make_uint4(0, 0, 0, 0));
  }
  n = 0;
}

}  // namespace emulator

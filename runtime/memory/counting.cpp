// Counts what torch's CPU allocator hands out to runs: bytes alive, their peak, and a limit beyond which it refuses.
//
// A block is counted for the run whose thread asked for it, from then on until anybody frees it: with its size as it
// was asked for, in a table by address. Worker threads of a parallel region count for the run if there is just one.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string>
#include <vector>

// Of the OpenMP library that torch has loaded, if it has.
extern "C" __attribute__((weak)) int omp_get_thread_num();

namespace {

struct CountFigures {
  int64_t live_bytes, peak_bytes, wanted_bytes, num_blocks;
};

struct Count {
  std::atomic<int64_t> live{0}, peak{0}, wanted{0}, num_blocks{0};
  std::atomic<int64_t> limit{0};
  std::atomic<bool> is_left{false};  // ended by another thread than its own, which finds out here
  uint64_t epoch = 0;                // of the run that uses it; 0 when none does
  Count* outer = nullptr;

  void change(int64_t size) {
    const int64_t now = live.fetch_add(size, std::memory_order_relaxed) + size;
    int64_t most = peak.load(std::memory_order_relaxed);
    while (now > most && !peak.compare_exchange_weak(most, now, std::memory_order_relaxed)) {
    }
  }
};

thread_local Count* current = nullptr;
std::atomic<Count*> only{nullptr};  // null where no run or more than one is under way

// Held for some ten instructions.
class SpinLock {
 public:
  void lock() {
    while (flag_.test_and_set(std::memory_order_acquire)) {
    }
  }
  void unlock() {
    flag_.clear(std::memory_order_release);
  }

 private:
  std::atomic_flag flag_ = ATOMIC_FLAG_INIT;
};

struct Block {
  void* address;  // null where nothing is
  Count* count;
  uint64_t epoch;
  size_t size;
};

// Open addressing with linear probing; a power of two of places, at most half of them taken.
class Table {
 public:
  Table() : blocks_(1024) {}

  void add(const Block& block) {
    if (2 * (size_ + 1) > blocks_.size()) {
      grow();
    }
    put(block);
    ++size_;
  }

  const Block* find(const void* address) const {
    if (address == nullptr) {
      return nullptr;
    }
    for (size_t i = home(address);; i = next(i)) {
      if (blocks_[i].address == address) {
        return &blocks_[i];
      }
      if (blocks_[i].address == nullptr) {
        return nullptr;
      }
    }
  }

  // Leaves no gap between a block and its home.
  void remove(const Block* block) {
    size_t gap = static_cast<size_t>(block - blocks_.data());
    for (size_t i = next(gap); blocks_[i].address != nullptr; i = next(i)) {
      const size_t distance = (i - home(blocks_[i].address)) & (blocks_.size() - 1);
      if (distance >= ((i - gap) & (blocks_.size() - 1))) {
        blocks_[gap] = blocks_[i];
        gap = i;
      }
    }
    blocks_[gap].address = nullptr;
    --size_;
  }

 private:
  size_t home(const void* address) const {
    const uint64_t key = reinterpret_cast<uintptr_t>(address) >> 4;
    return (key * 0x9E3779B97F4A7C15u >> 20) & (blocks_.size() - 1);
  }
  size_t next(size_t i) const {
    return (i + 1) & (blocks_.size() - 1);
  }
  void put(const Block& block) {
    size_t i = home(block.address);
    while (blocks_[i].address != nullptr) {
      i = next(i);
    }
    blocks_[i] = block;
  }
  void grow() {
    std::vector<Block> old(2 * blocks_.size());
    old.swap(blocks_);
    for (const Block& block : old) {
      if (block.address != nullptr) {
        put(block);
      }
    }
  }

  std::vector<Block> blocks_;
  size_t size_ = 0;
};

class Counts {
 public:
  // The count that this thread's allocations belong to, or null.
  Count* mine() {
    while (current != nullptr && current->is_left) {
      recycle(*current);
    }
    if (current != nullptr || only.load(std::memory_order_relaxed) == nullptr) {
      return current;
    }
    const bool is_worker = omp_get_thread_num != nullptr && omp_get_thread_num() > 0;
    return is_worker ? only.load() : nullptr;
  }

  // Before the memory is taken. Only the run's own thread is refused: others may have nobody to catch it.
  static void admit(Count& count, size_t size) {
    const int64_t more = static_cast<int64_t>(size);
    if (&count == current && count.live.load() + more > count.limit.load()) {
      count.wanted = count.live + more;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "the budget leaves ", count.limit.load() - count.live.load(),
          " bytes for a block of ", more);
    }
    count.change(more);
  }

  void add(Count& count, void* address, size_t size) {
    if (address == nullptr) {
      return;
    }
    ++count.num_blocks;
    const std::lock_guard<SpinLock> lock(lock_);
    table_.add({address, &count, count.epoch, size});
  }

  void remove(void* address) {
    const std::lock_guard<SpinLock> lock(lock_);
    const Block* const found = table_.find(address);
    if (found == nullptr) {
      return;
    }
    if (found->epoch == found->count->epoch) {
      found->count->change(-static_cast<int64_t>(found->size));
    }
    table_.remove(found);
  }

  size_t size_of(const Count& count, const void* address) {
    const std::lock_guard<SpinLock> lock(lock_);
    const Block* const found = table_.find(address);
    return found != nullptr && found->epoch == count.epoch ? found->size : 0;
  }

  Count* begin(int64_t live, int64_t limit) {
    Count* count;
    {
      const std::lock_guard<SpinLock> lock(lock_);
      if (free_.empty()) {
        free_.push_back(new Count());
      }
      count = free_.back();
      free_.pop_back();
      count->epoch = ++epoch_;
    }
    count->live = count->peak = live;
    count->limit = limit;
    count->wanted = count->num_blocks = 0;
    count->is_left = false;
    count->outer = current;
    current = count;
    const std::lock_guard<SpinLock> lock(lock_);
    active_.push_back(count);
    only = active_.size() == 1 ? count : nullptr;
    return count;
  }

  void end(Count* count) {
    {
      const std::lock_guard<SpinLock> lock(lock_);
      count->epoch = 0;
      count->limit = std::numeric_limits<int64_t>::max();
      active_.erase(std::find(active_.begin(), active_.end(), count));
      only = active_.size() == 1 ? active_.front() : nullptr;
    }
    if (current == count) {
      recycle(*count);
    } else {
      count->is_left = true;
    }
  }

  SpinLock lock_;  // taken around a fork

 private:
  void recycle(Count& count) {
    current = count.outer;
    const std::lock_guard<SpinLock> lock(lock_);
    free_.push_back(&count);
  }

  Table table_;
  std::vector<Count*> free_, active_;
  uint64_t epoch_ = 0;
};

Counts& counts() {
  // Never destroyed: tensors may outlive everything else.
  static Counts* const one = [] {
    pthread_atfork([] { counts().lock_.lock(); }, [] { counts().lock_.unlock(); }, [] { counts().lock_.unlock(); });
    return new Counts();
  }();
  return *one;
}

}  // namespace

// Of the interpreter.
extern "C" {
void* PyCapsule_New(void*, const char*, void (*)(void*));
void* PyCapsule_GetPointer(void*, const char*);
int PyCapsule_SetDestructor(void*, void (*)(void*));
int PyCapsule_SetContext(void*, void*);
void* PyCapsule_GetContext(void*);
}

namespace {

Count* counted(void* capsule) {
  return static_cast<Count*>(PyCapsule_GetPointer(capsule, nullptr));
}

// Whatever interrupts who owns a run, its thread is not refused memory once the run is gone.
void drop(void* capsule) {
  counts().end(counted(capsule));
}

}  // namespace

extern "C" {

void gascompile_count_read(void* run, CountFigures* figures) {
  const Count* const of = counted(run);
  *figures = {of->live, of->peak, of->wanted, of->num_blocks};
}

void gascompile_count_end(void* run) {
  PyCapsule_SetDestructor(run, nullptr);
  PyCapsule_SetContext(run, run);
  drop(run);
}

// For a run that has ended, and may be another one's by now, there is nothing to do.
void gascompile_count_limit(void* run, int64_t limit) {
  if (PyCapsule_GetContext(run) == nullptr) {
    counted(run)->limit = limit;
  }
}

// The peak begins anew; returns what is alive.
int64_t gascompile_count_mark(void* run) {
  Count* const of = counted(run);
  return of->peak = of->live.load();
}

void gascompile_count_adjust(void* run, int64_t change) {
  counted(run)->change(change);
}

// Bytes of the block at an address, 0 where it is none of this run.
size_t gascompile_count_size(void* run, void* address) {
  return counts().size_of(*counted(run), address);
}
}

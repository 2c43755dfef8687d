// An allocator of large blocks whose pages are used again for blocks of any size.
//
// A block is a run of addresses; its pages are moved into it, by mremap, from whatever blocks are free. So holes
// cannot add up: what the process holds is what was in use at the worst moment. No page is given back to the kernel
// between two uses, as taking it anew (a fault, zeros) costs more than most ops spend on it. Blocks begin at a page,
// as direct I/O asks for.
//
// Small blocks, and those of threads that have not asked for it, come from torch's own allocator as always. Whatever
// they come from, what runs ask for is counted: see counting.cpp.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr size_t kRegionBytes = size_t{1} << 40;
constexpr size_t kLeastRegionBytes = size_t{1} << 34;

thread_local bool active = false;

// Mappings of which Linux lets a process have 65530 by default; the rest is for everybody else.
constexpr size_t kMostPieces = 24576;

// A run of addresses. Its first bytes have pages; all of them do while it is used.
struct Slot {
  char* address;
  size_t size;
  uint64_t freed_at = 0;
  std::vector<size_t> ends = {};  // of the mappings that its pages came in, which mremap moves one at a time

  size_t backed() const {
    return ends.empty() ? 0 : ends.back();
  }
};

struct Figures {
  uint64_t live_bytes, peak_live_bytes, resident_bytes, num_joined, moved_bytes;
};

class Pages;
Pages& pages();

class Pages final : public c10::Allocator {
 public:
  // Blocks of at least `least_bytes` are served; their sizes are multiples of `unit_bytes`.
  bool configure(size_t unit_bytes, size_t least_bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (num_regions_ == 0) {
      if (!(moves_pages() && add_region(kLeastRegionBytes))) {
        return false;
      }
      guard_forks();
    }
    unit_ = unit_bytes;
    least_ = least_bytes;
    return true;
  }

  void set_limit(size_t limit_bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    limit_ = limit_bytes;
    keeps_ = true;
  }

  void mark() {
    const std::lock_guard<std::mutex> lock(mutex_);
    figures_.peak_live_bytes = figures_.live_bytes;
  }

  c10::DataPtr allocate(size_t size) override {
    Count* const count = counts().mine();
    if (count == nullptr) {
      return allocate_uncounted(size);
    }
    counts().admit(*count, size);
    c10::DataPtr block;
    try {
      block = allocate_uncounted(size);
    } catch (...) {
      count->change(-static_cast<int64_t>(size));
      throw;
    }
    void* const data = block.release_context();
    counts().add(*count, data, size);
    return {data, data, &Pages::release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &Pages::release;
  }

  void copy_data(void* target, const void* source, size_t count) const override {
    default_copy_data(target, source, count);
  }

  // Bytes from `data` that may be read and written, 0 if it is no block of this allocator.
  size_t capacity(void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = used_.find(static_cast<char*>(data));
    return found == used_.end() ? 0 : found->second.size;
  }

  // Give the pages of all free blocks to the kernel, and those of blocks that are freed before the next limit is set.
  void trim() {
    const std::lock_guard<std::mutex> lock(mutex_);
    keeps_ = false;
    while (!free_.empty()) {
      Slot slot = free_.begin()->second;
      forget(free_.begin());
      empty(slot);
    }
  }

  Figures figures() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return figures_;
  }

 private:
  using Free = std::map<uint64_t, Slot>;

  c10::DataPtr allocate_uncounted(size_t size) {
    if (!active || size < least_) {
      return c10::GetDefaultCPUAllocator()->allocate(size);
    }
    void* data = take(size);
    return {data, data, &Pages::release, c10::Device(c10::DeviceType::CPU)};
  }

  static void release(void* data);

  bool owns(const void* data) const {
    const char* at = static_cast<const char*>(data);
    for (size_t i = 0, count = num_regions_; i < count; ++i) {
      if (regions_[i].first <= at && at < regions_[i].second) {
        return true;
      }
    }
    return false;
  }

  // Whether this kernel moves pages and leaves their addresses taken; others could map something there.
  static bool moves_pages() {
    const size_t size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const auto map = [size](int protection) {
      return mmap(nullptr, size, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    };
    void* from = map(PROT_READ | PROT_WRITE);
    void* to = map(PROT_NONE);
    const bool moved = from != MAP_FAILED && to != MAP_FAILED &&
        mremap(from, size, size, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to) == to;
    munmap(from, size);
    munmap(to, size);
    return moved;
  }

  // A child of a fork has this thread alone: no other one may hold the lock at that moment.
  void guard_forks() {
    pthread_atfork([] { pages().mutex_.lock(); }, [] { pages().mutex_.unlock(); }, [] { pages().mutex_.unlock(); });
  }

  bool add_region(size_t least_bytes) {
    if (num_regions_ == regions_.size()) {
      return false;
    }
    for (size_t size = kRegionBytes; size >= std::max(kLeastRegionBytes, least_bytes); size /= 2) {
      void* data = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (data != MAP_FAILED) {
        next_ = static_cast<char*>(data);
        regions_[num_regions_] = {next_, next_ + size};
        ++num_regions_;
        return true;
      }
    }
    return false;
  }

  void* take(size_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    size = (size + unit_ - 1) / unit_ * unit_;
    Slot slot;
    const auto same = whole_.find(size);
    if (same != whole_.end()) {
      const auto newest = free_.find(same->second.back());
      slot = newest->second;
      forget(newest);
    } else {
      slot = bare(size);
      if (figures_.resident_bytes + size > limit_) {
        join(slot);
      }
      grow(slot);
    }
    used_[slot.address] = slot;
    figures_.live_bytes += size;
    figures_.peak_live_bytes = std::max(figures_.peak_live_bytes, figures_.live_bytes);
    return slot.address;
  }

  void give(char* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = used_.find(data);
    Slot slot = found->second;
    used_.erase(found);
    figures_.live_bytes -= slot.size;
    if (keeps_) {
      keep(slot);
    } else {
      empty(slot);
    }
  }

  // Addresses without pages.
  Slot bare(size_t size) {
    auto& same = bare_[size];
    if (!same.empty()) {
      char* address = same.back();
      same.pop_back();
      return {address, size};
    }
    if (next_ + size > regions_[num_regions_ - 1].second && !add_region(size)) {
      throw std::bad_alloc();
    }
    char* address = next_;
    next_ += size;
    return {address, size};
  }

  // Move pages of free blocks in, of those that were freed first; leaves the rest bare when there are no more.
  void join(Slot& slot) {
    while (slot.backed() < slot.size && !free_.empty()) {
      Slot donor = free_.begin()->second;
      forget(free_.begin());
      while (slot.backed() < slot.size && !donor.ends.empty()) {
        if (num_pieces_ >= kMostPieces || !move_piece(donor, slot)) {
          break;
        }
      }
      if (donor.ends.empty() || slot.backed() < slot.size) {
        // Used up, or no more mappings can be had: then new pages take the place of its own.
        empty(donor);
      } else {
        free_.emplace(donor.freed_at, donor);
      }
    }
  }

  // Move the donor's last pages, of one mapping, as many as the slot needs.
  bool move_piece(Slot& donor, Slot& slot) {
    const size_t begin = donor.ends.size() > 1 ? donor.ends[donor.ends.size() - 2] : 0;
    const size_t end = donor.ends.back();
    const size_t part = std::min(end - begin, slot.size - slot.backed());
    char* to = slot.address + slot.backed();
    const int flags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
    if (mremap(donor.address + end - part, part, part, flags, to) == MAP_FAILED) {
      // It may have left nothing there, where others could map something.
      mmap(to, part, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
      return false;
    }
    slot.ends.push_back(slot.backed() + part);
    ++num_pieces_;
    if (begin + part == end) {
      donor.ends.pop_back();
      --num_pieces_;
    } else {
      donor.ends.back() = end - part;
    }
    figures_.moved_bytes += part;
    figures_.num_joined += 1;
    return true;
  }

  // New pages for what is bare of a slot; the first use brings them.
  void grow(Slot& slot) {
    const size_t backed = slot.backed();
    if (backed == slot.size) {
      return;
    }
    if (mprotect(slot.address + backed, slot.size - backed, PROT_READ | PROT_WRITE) != 0) {
      empty(slot);
      throw std::bad_alloc();
    }
    slot.ends.push_back(slot.size);
    ++num_pieces_;
    figures_.resident_bytes += slot.size - backed;
  }

  void keep(Slot slot) {
    slot.freed_at = ++clock_;
    whole_[slot.size].push_back(slot.freed_at);
    free_.emplace(slot.freed_at, slot);
  }

  void forget(Free::iterator found) {
    const Slot& slot = found->second;
    if (slot.backed() == slot.size) {
      auto same = whole_.find(slot.size);
      auto& times = same->second;
      times.erase(std::find(times.begin(), times.end(), slot.freed_at));
      if (times.empty()) {
        whole_.erase(same);
      }
    }
    free_.erase(found);
  }

  // One bare mapping again, whatever was moved in and out of it.
  void empty(const Slot& slot) {
    num_pieces_ -= slot.ends.size();
    figures_.resident_bytes -= slot.backed();
    mmap(slot.address, slot.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    bare_[slot.size].push_back(slot.address);
  }

  std::mutex mutex_;
  size_t unit_ = 0, least_ = SIZE_MAX, limit_ = 0;
  bool keeps_ = false;
  uint64_t clock_ = 0;
  size_t num_pieces_ = 0;
  Figures figures_{};
  char* next_ = nullptr;
  std::array<std::pair<char*, char*>, 64> regions_;
  std::atomic<size_t> num_regions_ = 0;  // read without the lock
  std::unordered_map<char*, Slot> used_;
  Free free_;  // by the time when they were freed
  std::map<size_t, std::vector<uint64_t>> whole_;  // free blocks that have all their pages, by size
  std::map<size_t, std::vector<char*>> bare_;
};

Pages& pages() {
  // Never destroyed: tensors may outlive everything else.
  static Pages* const one = new Pages();
  return *one;
}

void Pages::release(void* data) {
  counts().remove(data);
  if (pages().owns(data)) {
    pages().give(static_cast<char*>(data));
  } else {
    c10::GetDefaultCPUAllocator()->raw_deleter()(data);
  }
}

}  // namespace

extern "C" {

int gascompile_pages_install(size_t unit_bytes, size_t least_bytes) {
  if (!pages().configure(unit_bytes, least_bytes)) {
    return -1;
  }
  c10::SetCPUAllocator(&pages(), 1);
  return 0;
}

// Whether torch's allocator is this one, which another library may have taken the place of for good.
int gascompile_count_install() {
  if (c10::GetCPUAllocator() != &pages()) {
    c10::SetCPUAllocator(&pages(), 1);
  }
  return c10::GetCPUAllocator() == &pages() ? 0 : -1;
}

// A new run of this thread, as a capsule.
void* gascompile_count_begin(int64_t live_bytes, int64_t limit_bytes) {
  return PyCapsule_New(counts().begin(live_bytes, limit_bytes), nullptr, &drop);
}

void gascompile_pages_activate(int on) {
  active = on != 0;
}

void gascompile_pages_limit(size_t limit_bytes) {
  pages().set_limit(limit_bytes);
}

// The storage takes its next memory from here; `storage` is a `c10::StorageImpl`.
void gascompile_pages_adopt(void* storage) {
  static_cast<c10::StorageImpl*>(storage)->set_allocator(&pages());
}

size_t gascompile_pages_capacity(void* data) {
  return pages().capacity(data);
}

void gascompile_pages_mark() {
  pages().mark();
}

void gascompile_pages_trim() {
  pages().trim();
}

void gascompile_pages_figures(Figures* figures) {
  *figures = pages().figures();
}
}

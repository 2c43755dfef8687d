// Positional reads and writes by threads of their own: between two of them no interpreter is in the way.
//
// A lane serves what it is given in order. Who submits owns the outcome, and keeps it until it says that it ended, if
// it says that it was submitted. What is read may lie anywhere in its file: whole pages come straight to where most of
// it belongs, and are moved to their place while the next ones are read.

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <future>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kPart = 4 << 20;  // what is moved while as much is read

struct Outcome {
  double begun_s, done_s;  // of the monotonic clock
  int32_t error;           // an errno; -1 where the file ends too early
  int32_t submitted;
  int32_t ended;           // written last
};

struct Job {
  int file;
  bool writes;
  char* memory;
  size_t size, needed;  // as many bytes are asked for, and so many have to be moved
  off_t offset;
  Outcome* outcome;
};

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int moved(const Job& job) {
  size_t done = 0;
  while (done < job.needed) {
    const off_t offset = job.offset + static_cast<off_t>(done);
    const ssize_t count = job.writes ? pwrite(job.file, job.memory + done, job.size - done, offset)
                                     : pread(job.file, job.memory + done, job.size - done, offset);
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count < 0) {
      // The end of the file lies within a page, behind which no direct read may begin.
      return errno == EINVAL && !job.writes && done % kPage != 0 ? -1 : errno;
    }
    if (count == 0) {
      return job.writes ? EIO : -1;
    }
    done += static_cast<size_t>(count);
  }
  return 0;
}

size_t page_up(size_t number) { return (number + kPage - 1) / kPage * kPage; }

// Runs beside the caller where the system has a thread for it.
std::future<void> beside(void (*work)(char*, const char*, size_t), char* to, const char* from, size_t size) {
  try {
    return std::async(std::launch::async, work, to, from, size);
  } catch (const std::system_error&) {
    work(to, from, size);
    return {};
  }
}

void move_down(char* to, const char* from, size_t size) { std::memmove(to, from, size); }

// Fills memory from a range of a file of which only whole pages can be read, to whole pages of memory.
int gathered(const Job& job) {
  const size_t head = static_cast<size_t>(job.offset) % kPage;
  const off_t first = job.offset - static_cast<off_t>(head);
  const uintptr_t begin = reinterpret_cast<uintptr_t>(job.memory);
  char* const pages = job.memory + (page_up(begin) - begin);
  const uintptr_t end = (begin + job.needed) / kPage * kPage;
  const size_t straight = end > page_up(begin) ? end - page_up(begin) : 0;
  std::future<void> moving;
  size_t placed = 0;  // bytes of the range that are in memory, or on their way there
  for (size_t done = 0; done < straight;) {
    const size_t part = straight - done < kPart ? straight - done : kPart;
    const off_t offset = first + static_cast<off_t>(done);
    const int error = moved({job.file, false, pages + done, part, part, offset, nullptr});
    if (moving.valid()) {
      moving.get();
    }
    if (error != 0) {
      return error;
    }
    const char* const from = pages + head + placed;
    const size_t count = done + part - head - placed;
    if (from != job.memory + placed) {
      moving = beside(move_down, job.memory + placed, from, count);
    }
    placed += count;
    done += part;
  }
  if (moving.valid()) {
    moving.get();
  }
  // Less than two pages of memory have no whole page; with what the first page of the file has before the range.
  alignas(kPage) char rest[4 * kPage];
  const size_t skipped = straight == 0 ? head : 0;
  const size_t left = job.needed - placed;
  const off_t offset = first + static_cast<off_t>(straight);
  if (left == 0) {
    return 0;
  }
  const int error = moved({job.file, false, rest, page_up(skipped + left), skipped + left, offset, nullptr});
  if (error == 0) {
    std::memcpy(job.memory + placed, rest + skipped, left);
  }
  return error;
}

bool is_aligned(const Job& job) {
  return (static_cast<size_t>(job.offset) | reinterpret_cast<uintptr_t>(job.memory) | job.size) % kPage == 0;
}

int served(const Job& job) { return job.writes || is_aligned(job) ? moved(job) : gathered(job); }

class Lane {
 public:
  Lane() : thread_([this] { serve(); }) {}

  // What was submitted is still served.
  ~Lane() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void submit(const Job& job) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      jobs_.push_back(job);
      job.outcome->submitted = 1;
    }
    changed_.notify_all();
  }

  // Whether a job ended within the time.
  bool wait(const Outcome& outcome, double most_s) {
    std::unique_lock<std::mutex> lock(mutex_);
    return ended_.wait_for(lock, std::chrono::duration<double>(most_s), [&] { return outcome.ended != 0; });
  }

 private:
  void serve() {
    // Signals are for the main thread, which wakes up for them.
    sigset_t signals;
    sigfillset(&signals);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGPROF}) {
      sigdelset(&signals, fault);
    }
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return closed_ || !jobs_.empty(); });
      if (jobs_.empty()) {
        return;
      }
      const Job job = jobs_.front();
      jobs_.pop_front();
      lock.unlock();
      job.outcome->begun_s = now_s();
      job.outcome->error = served(job);
      job.outcome->done_s = now_s();
      lock.lock();
      std::atomic_thread_fence(std::memory_order_release);
      job.outcome->ended = 1;
      ended_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_, ended_;
  std::deque<Job> jobs_;
  bool closed_ = false;
  std::thread thread_;  // last, as it uses all the others
};

}  // namespace

extern "C" {

// Null where no thread can be had.
void* gascompile_lane_open() {
  try {
    return new Lane();
  } catch (const std::exception&) {
    return nullptr;
  }
}

void gascompile_lane_submit(
    void* lane,
    int file,
    int writes,
    void* memory,
    size_t size,
    size_t needed,
    int64_t offset,
    Outcome* outcome) {
  static_cast<Lane*>(lane)->submit(
      {file, writes != 0, static_cast<char*>(memory), size, needed, static_cast<off_t>(offset), outcome});
}

int gascompile_lane_wait(void* lane, Outcome* outcome, double most_s) {
  return static_cast<Lane*>(lane)->wait(*outcome, most_s) ? 1 : 0;
}

// Forgets the lane before it lets it go: who is interrupted after this cannot close it twice.
void gascompile_lane_close(void** lane) {
  Lane* const found = static_cast<Lane*>(*lane);
  *lane = nullptr;
  delete found;
}
}

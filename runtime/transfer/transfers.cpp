// Positional reads and writes by threads of their own: between two of them no interpreter is in the way.
//
// A lane serves what it is given in order. Who submits owns the outcome, and keeps it until it says that it ended, if
// it says that it was submitted.

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

namespace {

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
      return errno;
    }
    if (count == 0) {
      return job.writes ? EIO : -1;
    }
    done += static_cast<size_t>(count);
  }
  return 0;
}

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
      job.outcome->error = moved(job);
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

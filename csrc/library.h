#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace autokern {

// A CPU library, loaded from bytes that were verified before; stays loaded for the life of the process.
class Library {
 public:
  // Throws c10::Error where the bytes do not load, or export another identity than `identity`. Safe to call from
  // threads.
  static std::shared_ptr<Library> load(const std::string& bytes, const std::string& identity);
  void* symbol(const std::string& name) const;

 private:
  explicit Library(void* handle) : handle_(handle) {}
  void* handle_;
};

// Loads libraries on a thread of its own while the caller verifies the next ones: a load is system calls and page
// faults for a tenth of a millisecond, and a pack has a thousand. Used by one thread; `take` waits.
class LibraryOpener {
 public:
  LibraryOpener() : thread_([this] { run(); }) {}
  ~LibraryOpener();
  size_t add(std::string bytes, std::string identity);
  // Once for each number that `add` gave; throws what the load threw.
  std::shared_ptr<Library> take(size_t number);

 private:
  struct Job {
    std::string bytes;
    std::string identity;
    std::shared_ptr<Library> library;
    std::exception_ptr error;
  };
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_; // a deque's elements stay where they are
  size_t done_ = 0;
  bool closed_ = false;
  std::thread thread_;
};

} // namespace autokern

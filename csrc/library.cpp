#include "library.h"

#include <c10/util/Exception.h>

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

namespace autokern {
namespace {

void write_all(int fd, const std::string& bytes) {
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n = ::write(fd, bytes.data() + done, bytes.size() - done);
    if (n < 0 && errno == EINTR) {
      continue;
    }
    TORCH_CHECK(n > 0, "autokern: cannot write a kernel library to memory: ", std::strerror(errno));
    done += static_cast<size_t>(n);
  }
}

class SealedFile {
 public:
  explicit SealedFile(const std::string& bytes) : fd_(::memfd_create("autokern", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
    TORCH_CHECK(fd_ >= 0, "autokern: memfd_create failed: ", std::strerror(errno));
    try {
      write_all(fd_, bytes);
      const int seals = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;
      TORCH_CHECK(::fcntl(fd_, F_ADD_SEALS, seals) == 0, "autokern: cannot seal: ", std::strerror(errno));
    } catch (...) {
      ::close(fd_);
      throw;
    }
  }
  ~SealedFile() { ::close(fd_); }
  SealedFile(const SealedFile&) = delete;
  SealedFile& operator=(const SealedFile&) = delete;

  // dlopen takes a name that it has seen for the library that it already has under it, and the descriptor's number is
  // given out again once this one is closed. So each load writes the same place in another way: "/." for a 0 and "//."
  // for a 1 of the load's number.
  std::string path() const {
    static std::atomic<uint64_t> loads{0};
    std::string name = "/proc/self/fd";
    for (uint64_t number = loads++; number; number >>= 1) {
      name += number & 1 ? "//." : "/.";
    }
    return name + "/" + std::to_string(fd_);
  }

 private:
  int fd_;
};

} // namespace

std::shared_ptr<Library> Library::load(const std::string& bytes, const std::string& identity) {
  void* handle = nullptr;
  {
    // Closed after loading: a library lives by its mappings, and a process has often no more than 1,024 descriptors.
    const SealedFile file(bytes);
    handle = ::dlopen(file.path().c_str(), RTLD_NOW | RTLD_LOCAL);
  }
  TORCH_CHECK(handle, "autokern: cannot load a kernel library: ", ::dlerror());
  const auto library = std::shared_ptr<Library>(new Library(handle));
  const auto* seen = static_cast<const char*>(library->symbol("autokern_identity"));
  TORCH_CHECK(
      std::strncmp(seen, identity.c_str(), identity.size() + 1) == 0,
      "autokern: loaded library is not the one that was verified (expected identity ", identity, ")");
  return library;
}

void* Library::symbol(const std::string& name) const {
  void* address = ::dlsym(handle_, name.c_str());
  TORCH_CHECK(address, "autokern: kernel library does not export ", name);
  return address;
}

LibraryOpener::~LibraryOpener() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

size_t LibraryOpener::add(std::string bytes, std::string identity) {
  const std::lock_guard<std::mutex> lock(mutex_);
  jobs_.push_back({std::move(bytes), std::move(identity), nullptr, nullptr});
  changed_.notify_all();
  return jobs_.size() - 1;
}

std::shared_ptr<Library> LibraryOpener::take(size_t number) {
  std::unique_lock<std::mutex> lock(mutex_);
  TORCH_CHECK(number < jobs_.size(), "autokern: library ", number, " of ", jobs_.size(), " was never added");
  changed_.wait(lock, [&] { return done_ > number; });
  Job& job = jobs_[number];
  if (job.error) {
    std::rethrow_exception(job.error);
  }
  return std::move(job.library);
}

void LibraryOpener::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closed_ || done_ < jobs_.size(); });
    if (closed_) {
      return;
    }
    Job& job = jobs_[done_];
    lock.unlock();
    try {
      job.library = Library::load(job.bytes, job.identity);
    } catch (...) {
      job.error = std::current_exception();
    }
    std::string().swap(job.bytes);
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
}

} // namespace autokern

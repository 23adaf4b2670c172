#include "rank_processes.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <stdexcept>
#include <thread>

#include "qcoll/base/deadline.h"

namespace qcoll::test {
namespace {

namespace fs = std::filesystem;

// Beyond the timeouts of the calls, whose errors say more.
constexpr std::chrono::seconds kLimit{150};

fs::path make_folder() {
  std::string name = (fs::temp_directory_path() / "qcoll_processes_XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed: " + name);
  return name;
}

[[noreturn]] void be_rank(const Ranks& ranks, Rank rank, const fs::path& folder) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  int status = 0;
  try {
    ranks.run(rank, folder);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: rank %d: %s\n", ranks.name.c_str(), rank, error.what());
    status = 1;
  }
  // Not _exit: leaks are looked for, and races reported, on the way out.
  std::exit(status);
}

bool as_expected(const Ranks& ranks, Rank rank, int status) {
  const bool dies = ranks.victim == rank;
  if (WIFSIGNALED(status)) {
    if (dies && WTERMSIG(status) == SIGKILL) return true;
    std::fprintf(stderr, "%s: rank %d ended by signal %d\n", ranks.name.c_str(), rank,
                 WTERMSIG(status));
    return false;
  }
  if (!dies && WEXITSTATUS(status) == 0) return true;
  std::fprintf(stderr, "%s: rank %d ended with status %d%s\n", ranks.name.c_str(), rank,
               WEXITSTATUS(status), dies ? ", it should have been killed" : "");
  return false;
}

}  // namespace

bool run_processes(const Ranks& ranks) {
  const fs::path folder = make_folder();
  std::map<pid_t, Rank> running;
  std::fflush(nullptr);  // a child must not print what is still in the buffers
  for (Rank rank = 0; rank < ranks.size; ++rank) {
    const pid_t child = ::fork();
    if (child < 0) throw std::runtime_error("fork failed");
    if (child == 0) be_rank(ranks, rank, folder);
    running[child] = rank;
  }
  bool well = true;
  for (const Deadline deadline(kLimit); !running.empty() && !deadline.passed();) {
    int status = 0;
    const pid_t child = ::waitpid(-1, &status, WNOHANG);
    if (child <= 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      continue;
    }
    well &= as_expected(ranks, running.at(child), status);
    running.erase(child);
  }
  for (const auto& [child, rank] : running) {
    std::fprintf(stderr, "%s: rank %d still ran after %d s\n", ranks.name.c_str(), rank,
                 static_cast<int>(kLimit.count()));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    well = false;
  }
  fs::remove_all(folder);
  return well;
}

}  // namespace qcoll::test

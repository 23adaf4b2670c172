#include "qcoll/transport/control_plane.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <exception>

#include "qcoll/base/fork.h"

namespace qcoll::transport {
namespace {

// Strangers cost at most this many descriptors, for at most this long.
constexpr std::size_t kMaxGuests = 256;
constexpr auto kGuestPatience = std::chrono::seconds(10);
// Without descriptors and without guests to show out, the listener rests.
constexpr auto kListenerRest = std::chrono::milliseconds(100);

}  // namespace

std::shared_ptr<ControlPlane> ControlPlane::shared() {
  static std::mutex mutex;
  static std::weak_ptr<ControlPlane> current;
  const std::lock_guard lock(mutex);
  std::shared_ptr<ControlPlane> plane = current.lock();
  // A forked child inherits the object but not its thread.
  if (!plane || plane->owner_pid_ != ::getpid() || plane->failed_.load()) {
    plane.reset(new ControlPlane);
    current = plane;
  }
  return plane;
}

ControlPlane::ControlPlane()
    : owner_pid_(::getpid()), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  const char* interfaces = std::getenv("QCOLL_SOCKET_IFNAME");
  const bool chosen = interfaces != nullptr && *interfaces != '\0';
  addresses_ = local_addresses(chosen ? interfaces : "");
  listener_ = listen_on(chosen ? &addresses_.front() : nullptr);
  if (chosen) addresses_.resize(1);
  hide_from_children(listener_.fd.get());
  thread_ = std::thread([this] {
    ::pthread_setname_np(::pthread_self(), "qcoll_control");
    run();
  });
}

ControlPlane::~ControlPlane() {
  if (owner_pid_ != ::getpid()) {
    thread_.detach();  // it does not exist in this process
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake();
  thread_.join();
  forget(listener_.fd.get());
}

void ControlPlane::wake() const {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof(one));
}

void ControlPlane::add(std::shared_ptr<GroupLinks> group) {
  {
    const std::lock_guard lock(mutex_);
    groups_[{group->group(), group->rank()}] = std::move(group);
  }
  wake();
}

void ControlPlane::remove(const GroupLinks& group) {
  {
    const std::lock_guard lock(mutex_);
    groups_.erase({group.group(), group.rank()});
  }
  wake();
}

std::vector<std::shared_ptr<GroupLinks>> ControlPlane::groups() {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<GroupLinks>> all;
  for (const auto& [key, group] : groups_) all.push_back(group);
  return all;
}

std::shared_ptr<GroupLinks> ControlPlane::find(const Hello& hello) {
  const std::lock_guard lock(mutex_);
  const auto found = groups_.find({hello.group, hello.to});
  return found == groups_.end() ? nullptr : found->second;
}

void ControlPlane::run() {
  try {
    serve();
  } catch (const std::exception& error) {
    failed_.store(true);
    for (const auto& group : groups())
      group->abort(TransportError("the control thread of rank " + std::to_string(group->rank()) +
                                      " failed: " + error.what(),
                                  group->rank()));
  }
}

void ControlPlane::serve() {
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      if (stop_) return;
    }
    const bool resting = Clock::now() < accept_again_;
    const short listen_for = resting ? 0 : POLLIN;
    std::vector<pollfd> entries{{wake_.get(), POLLIN, 0}, {listener_.fd.get(), listen_for, 0}};
    for (const Guest& guest : guests_) entries.push_back({guest.fd(), POLLIN, 0});
    const std::size_t first_link = entries.size();
    const auto members = groups();
    std::vector<std::size_t> ends;
    for (const auto& group : members) {
      group->append_poll_entries(entries);
      ends.push_back(entries.size());
    }
    // With guests, wake now and then to show out those that stay silent.
    ::poll(entries.data(), entries.size(), resting ? 100 : guests_.empty() ? -1 : 1000);

    if (entries[0].revents != 0) {
      std::uint64_t count = 0;
      [[maybe_unused]] const auto got = ::read(wake_.get(), &count, sizeof(count));
    }
    for (std::size_t i = guests_.size(); i-- > 0;) {
      const bool heard = entries[2 + i].revents != 0;
      if ((heard && !guests_[i].hear(find_)) || guests_[i].overdue(Clock::now()))
        guests_.erase(guests_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (entries[1].revents != 0) accept_guests();
    std::size_t entry = first_link;
    for (std::size_t g = 0; g < members.size(); ++g)
      for (; entry < ends[g]; ++entry)
        if (entries[entry].revents != 0)
          members[g]->handle_events(entries[entry].fd, entries[entry].revents);
  }
}

void ControlPlane::accept_guests() {
  for (;;) {
    Fd fd(::accept4(listener_.fd.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      // No descriptors or no memory. The caller stays in the listener's queue, which stays
      // readable.
      if (make_room()) continue;
      accept_again_ = Clock::now() + kListenerRest;
      return;
    }
    if (guests_.size() >= kMaxGuests) make_room();
    set_low_latency(fd.get());
    Guest guest(std::move(fd), Clock::now() + kGuestPatience);
    // Its hello has usually come: a peer of the group is known at once, however many strangers
    // wait.
    if (guest.hear(find_)) guests_.push_back(std::move(guest));
  }
}

// The one that has waited longest without a valid hello, or else the one that has waited longest.
bool ControlPlane::make_room() {
  const auto leave = [&](std::size_t i) {
    guests_.erase(guests_.begin() + static_cast<std::ptrdiff_t>(i));
  };
  for (std::size_t i = 0; i < guests_.size(); ++i) {
    if (guests_[i].named()) continue;
    const bool stays = guests_[i].hear(find_);  // a last time
    if (stays && guests_[i].named()) continue;
    leave(i);
    return true;
  }
  if (guests_.empty()) return false;
  leave(0);
  return true;
}

}  // namespace qcoll::transport

// What a forked child must not keep: a process is dead to its peers when its sockets end, and a
// child (a DataLoader worker, say) that held copies would keep it alive.
#pragma once

namespace qcoll {

// In every later child, `fd` will be /dev/null instead. The number stays taken, so that the
// parent's objects, of which the child has copies, close nothing else by it.
void hide_from_children(int fd);
// Before the descriptor is closed.
void forget(int fd);

}  // namespace qcoll

// The version of this program.
#pragma once

namespace tessera {

/// Returns the version and the commit, such as "0.1.0+6a74773". It ends in ".changed" if files differed from that
/// commit. A build outside of a git checkout has the version alone.
const char* version();

}  // namespace tessera

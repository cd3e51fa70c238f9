// Which program this is.
#pragma once

namespace tessera {

/// The version and the commit, as in "0.1.0+6a74773"; ".changed" at its end if files were not as committed. A build
/// outside of a git checkout has the version alone.
const char* version();

}  // namespace tessera

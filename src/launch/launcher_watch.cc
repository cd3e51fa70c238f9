#include "launch/launcher_watch.h"

#include <fmt/format.h>

#include <algorithm>

namespace tessera {
namespace {

/// The most silence of a launcher, in seconds, that counts between two calls of look().
constexpr double kLongestLookGap = 2.0;

/// Returns the job as Slurm's own output names it.
std::string describe_job(const LaunchState::Job& job) {
  return fmt::format("job {} (Restarts={})", job.id, job.restarts);
}

}  // namespace

std::string LauncherWatch::look(const LaunchState& state, double now) {
  const bool was_known = is_known_, was_suspect = is_suspect();
  // Times in launch.json are from another clock, so they are only compared for a change.
  const bool is_changed = was_known && state.time != state_.time;
  const bool is_new_launcher = !was_known || state.endpoint != state_.endpoint || state.job != state_.job;
  silent_ = is_changed ? 0.0 : silent_ + (was_known ? std::min(now - looked_, kLongestLookGap) : 0.0);
  is_alive_ = !is_new_launcher && (is_alive_ || is_changed);
  if (is_new_launcher) is_reachable_.reset();
  is_known_ = true;
  looked_ = now;
  state_ = state;
  is_over_ = state.state == "done" || (state.has_ended() && !state.job);
  if (is_over_) return fmt::format("run {} has ended: {}", state.run_id, state.state);
  if (!is_new_launcher && !(is_changed && was_suspect)) return "";
  return fmt::format("run {}: {}, step {} of {}, launcher on {}, {}", state.run_id, state.state, state.step,
                     state.num_steps, state.host,
                     state.job ? describe_job(*state.job) : fmt::format("engine {}", state.engine));
}

LauncherWatch::Verdict LauncherWatch::judge(const SlurmJob& job, bool answers, double now) {
  const std::string name = "job " + state_.job->id;
  const std::string silence =
      fmt::format("the launcher on {} has written nothing for {:g} s (--silent)", state_.host, options_.silent_seconds);
  if (job.has_ended()) {
    is_over_ = true;
    if (state_.has_ended())
      return {.text = fmt::format("run {} has {}, {} is {}", state_.run_id, state_.state, name, job.state)};
    return {.text = fmt::format("{} is {}, but the run has not ended; submit its script again to go on with it", name,
                                job.state)};
  }
  // A job that Slurm has requeued in the meantime is not requeued again before its new launcher has written.
  if (job.state != "RUNNING" || job.restarts != state_.job->restarts) {
    return {.text = fmt::format("{} is {}: waiting for its launcher", describe_job({state_.job->id, job.restarts}),
                                job.state)};
  }
  if (state_.has_ended()) return {};  // its script is about to end
  if (answers) return {.text = silence + ", but it answers: its storage may hang or be full"};
  if (requeued_ == state_.job) return {.requeue = true, .again = true, .text = {}};
  if (!job.host_is_down && !is_reachable_.value_or(false)) {
    return {.text = fmt::format("{}. Whether it is lost is not known: it was never reached at {}, and Slurm does not "
                                "say that {} is down. If it is lost: scontrol requeue {}",
                                silence, state_.endpoint, job.host, state_.job->id)};
  }
  if (!requeues_.take(now)) {
    return {.text = fmt::format("{}, and does not answer, but {} was requeued {} times within an hour, the limit "
                                "(--requeues-per-hour). To start it again: scontrol requeue {}",
                                silence, name, requeues_.most(), state_.job->id)};
  }
  requeued_ = state_.job;
  return {.requeue = true,
          .text = fmt::format("{}, and does not answer{}: {} is requeued", silence,
                              job.host_is_down ? fmt::format(", and Slurm says that {} is down", job.host) : "", name)};
}

}  // namespace tessera

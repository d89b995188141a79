"""The table of routes: every page and every action, and the role that it needs. Nothing else can be reached."""

from outboxq.dashboard import doors
from outboxq.dashboard.parameters import OfJob
from outboxq.dashboard.roles import Role
from outboxq.dashboard.route import Action, Door, Route, Screen
from outboxq.dashboard.views import dead, finished, flow, jobs, kinds, once, operate, overview, queues

ROUTES: tuple[Route, ...] = (
    Door(path="", answer=doors.home, needs=Role.READER),
    Door(path="login", answer=doors.ask_login, needs=None),
    Door(path="login", answer=doors.log_in, needs=None, method="POST"),
    Door(path="logout", answer=doors.log_out, needs=Role.READER, method="POST"),
    Door(path="static/{version}/{name:path}", answer=doors.send_file, needs=None),
    Door(path="{db}/live/{name}", answer=doors.follow, needs=Role.READER),
    Screen(path="", show=overview.show_overview, section="overview", live=True),
    Screen(path="doctor", show=operate.show_doctor, section="doctor"),
    Screen(path="queues", show=queues.show_queues, section="queues", live=True),
    Screen(path="queues/{queue}", show=queues.show_queue, takes=queues.AskedQueue, section="queues"),
    Screen(path="kinds", show=kinds.show_kinds, takes=kinds.AskedKinds, section="kinds"),
    Screen(path="kinds/{kind}", show=kinds.show_kind, takes=kinds.AskedKind, section="kinds"),
    Screen(path="jobs", show=jobs.show_jobs, takes=jobs.AskedJobs, section="jobs"),
    Screen(path="jobs/{job_id}", show=jobs.show_one_job, takes=OfJob, section="jobs"),
    Screen(path="dead", show=dead.show_dead_letters, takes=dead.AskedDead, section="dead"),
    Screen(path="dead/{job_id}", show=dead.show_dead_letter, takes=OfJob, section="dead"),
    Screen(path="done", show=finished.show_done_jobs, takes=finished.AskedDone, section="done"),
    Screen(path="done/{job_id}", show=finished.show_done_job, takes=OfJob, section="done"),
    Screen(path="schedules", show=flow.show_schedules, takes=flow.AskedSchedules, section="schedules"),
    Screen(path="schedules/{name}", show=flow.show_one_schedule, takes=flow.AskedSchedule, section="schedules"),
    Screen(path="flow", show=flow.show_flow, section="flow"),
    Screen(path="batches", show=flow.show_batches, section="batches"),
    Screen(path="batches/{batch_id}", show=flow.show_one_batch, takes=flow.AskedBatch, section="batches"),
    Screen(path="effects", show=once.show_effects, takes=once.AskedEffects, section="effects"),
    Screen(path="effects/{scope}/{key}", show=once.show_one_effect, takes=once.AskedEffect, section="effects"),
    Screen(path="inbox", show=once.show_messages, takes=once.AskedMessages, section="inbox"),
    Screen(path="inbox/{consumer}/{message_id}", show=once.show_one_message, takes=once.AskedMessage, section="inbox"),
    Screen(path="relays", show=operate.show_relays, section="relays", live=True),
    Screen(path="audit", show=operate.show_entries, takes=operate.AskedAudit, section="audit"),
    Screen(path="audit/{entry}", show=operate.show_entry, takes=operate.AskedEntry, section="audit"),
    Screen(path="bulk", show=operate.show_bulk_runs, takes=operate.AskedAudit, section="bulk"),
    Action(
        path="queues/{queue}/pause",
        name="queue.pause",
        act=queues.pause_queue,
        takes=queues.ChangeQueue,
        needs=Role.OPERATOR,
    ),
    Action(
        path="queues/{queue}/resume",
        name="queue.resume",
        act=queues.resume_queue,
        takes=queues.ChangeQueue,
        needs=Role.OPERATOR,
    ),
)
LIVE_SCREENS = {each.path or "overview": each for each in ROUTES if isinstance(each, Screen) and each.live}

// SPDX-License-Identifier: Apache-2.0
//! The table from each access of a check to the code that it stands for, with the weakest order at which the check holds.
//! The code may be stronger: Go's atomics are sequentially consistent, and so are most of C's.

use std::path::Path;

#[derive(Clone, Copy, PartialEq)]
pub enum Order {
    Relaxed,
    Acquire,
    Release,
    AcqRel,
    SeqCst,
}
use Order::*;

/// The next weaker order; None below Relaxed.
pub fn weaker(o: Order) -> Option<Order> {
    match o {
        SeqCst => Some(AcqRel),
        AcqRel => panic!("an access of the table needs one half of AcqRel"),
        Acquire | Release => Some(Relaxed),
        Relaxed => None,
    }
}

pub struct Row {
    pub check: &'static str,
    pub access: &'static str,
    pub needs: Order,
    /// File, function, and a piece of the function's text with the order: a change of it fails.
    pub code: &'static [Code],
}

type Code = (&'static str, &'static str, &'static str);

const fn row(check: &'static str, access: &'static str, needs: Order, code: &'static [Code]) -> Row {
    Row { check, access, needs, code }
}

const SHM: &str = "cbindings/src/shm.c";
const SHM_H: &str = "cbindings/src/shm.h";
const WORKER: &str = "cbindings/src/worker.c";
const PUBLISHER: &str = "cbindings/src/publisher.c";
const FOLLOWER: &str = "cbindings/src/follower.c";
const SESSION: &str = "shm/session.go";
const BOARD: &str = "shm/board.go";
const BELL: &str = "shm/bell.go";
const PARTS: &str = "shm/parts.go";

const PUSH_TAIL: &[Code] =
    &[(SHM, "rb_push", "atomic_exchange(&p->words->tail, p->tail + 1)"), (SESSION, "Push", "p.words.Tail.Swap(p.tail)")];
const PENDING_TAIL: &[Code] = &[(SESSION, "Pending", "c.words.Tail.Load()")];
const END_CAS: &[Code] =
    &[(SHM, "rb_board_end", "atomic_compare_exchange_weak(word, &old"), (BOARD, "End", "w.CompareAndSwap(uint64(old)")];
const WORD_LOAD: &[Code] = &[
    (SHM_H, "rb_board_word", "atomic_load_explicit(&b->words[slot], memory_order_acquire)"),
    (BOARD, "Word", "b.words[slot].Load()"),
];
const RING_ADD: &[Code] =
    &[(SHM, "rb_board_ring", "atomic_fetch_add(&b->bells[slot].count, 1)"), (BELL, "Ring", "b.Count.Add(1)")];
const RUNG_LOAD: &[Code] = &[
    ("cbindings/src/waiting.c", "lead", "atomic_load_explicit(&l->session.board.bells[l->first].count, memory_order_acquire)"),
    ("client/waiting.go", "lead", "l.bell.Count.Load()"),
];
const MAIL_TAIL: &[Code] = &[
    (WORKER, "has_mail", "atomic_load(&w->mail->tail)"),
    (BELL, "Wait", "m.Tail.Load()"),
    ("worker/worker.go", "hasNext", "w.mail.Tail.Load()"),
    ("worker/worker.go", "tryNext", "w.mail.Tail.Load()"),
];
const BELL_ADD: &[Code] = &[(SESSION, "Poke", "m.Bell.Add(1)")];
const BELL_LOAD: &[Code] = &[
    (WORKER, "next", "uint32_t seen = w->mail->bell;"),
    (WORKER, "rb_worker_wait", "uint32_t seen = w->mail->bell;"),
    ("worker/worker.go", "await", "w.mail.Bell.Load()"),
];
const POST_TAIL: &[Code] = &[(SESSION, "Post", "m.Tail.Store(n + 1)")];
const IN_USE_STORE: &[Code] = &[(FOLLOWER, "acquire", "atomic_store(in_use, rb_buffer_of(word) + 1)")];
const IN_USE_CLEAR: &[Code] = &[
    (FOLLOWER, "leave", "in_use, 0)"),
    ("shm/weights.go", "ForgetFollower", "InUse.Store(0)"), // of a follower that is dead
];
const IN_USE_LOAD: &[Code] = &[(PUBLISHER, "free_buffer", "atomic_load(&l->followers[i].in_use)")];

pub const ROWS: &[Row] = &[
    row("header", "magic store", Release, &[
        ("shm/layout.go", "WriteHeader", "at[atomic.Uint64](s.mem, 0).Store(magic)"),
        ("shm/weights.go", "CreateWeights", "at[atomic.Uint64](seg.mem, 0).Store(magic)"),
    ]),
    row("header", "magic load", Acquire, &[
        ("cbindings/src/attach.c", "rb_check_header", "atomic_load((_Atomic uint64_t *)(void *)segment->at)"),
        ("cbindings/src/weights.c", "open_segment", "rb_check_header(&l->segment"),
        ("shm/layout.go", "CheckHeader", "at[atomic.Uint64](s.mem, 0).Load()"),
    ]),
    row("entry", "head load", Acquire, &[(SHM, "rb_push", "atomic_load(&p->words->head)"), (SESSION, "Push", "p.words.Head.Load()")]),
    row("entry", "tail swap", Release, PUSH_TAIL),
    row("entry", "tail load", Acquire, PENDING_TAIL),
    row("entry", "head store", Release, &[(SESSION, "Give", "c.words.Head.Store(c.head)")]),
    row("arm", "tail swap", SeqCst, PUSH_TAIL),
    row("arm", "armed load", SeqCst, &[(SHM, "rb_push", "atomic_load(&p->words->armed_at)"), (SESSION, "Push", "p.words.ArmedAt.Load()")]),
    row("arm", "armed swap", SeqCst, &[(SESSION, "Arm", "c.words.ArmedAt.Swap(c.head)")]),
    row("arm", "tail load", SeqCst, &[(SESSION, "Arm", "c.words.Tail.Load()")]),
    row("mail", "tail store", SeqCst, POST_TAIL),
    row("mail", "bell add", Relaxed, BELL_ADD),
    row("mail", "parked load", SeqCst, &[(SESSION, "Poke", "m.Parked.Load()")]),
    row("mail", "bell load", Relaxed, BELL_LOAD),
    row("mail", "parked swap", SeqCst, &[(WORKER, "park", "atomic_exchange(&w->mail->parked, 1)"), (BELL, "Wait", "m.Parked.Swap(1)")]),
    row("mail", "tail load", SeqCst, MAIL_TAIL),
    row("bell", "tail store", Relaxed, POST_TAIL),
    row("bell", "bell add", Release, BELL_ADD),
    row("bell", "bell load", Acquire, BELL_LOAD),
    row("bell", "tail load", Relaxed, MAIL_TAIL),
    row("end", "word cas", Release, END_CAS),
    row("end", "bell add", Release, RING_ADD),
    row("end", "bell load", Acquire, RUNG_LOAD),
    row("end", "word load", Acquire, WORD_LOAD),
    row("parts", "shown store", Release, &[
        ("cbindings/src/show.c", "rb_taken_show", "| steps, memory_order_release)"),
        (PARTS, "Show", "b.bells[slot].shown.Store("),
    ]),
    row("parts", "bell add", Release, RING_ADD),
    row("parts", "bell load", Acquire, RUNG_LOAD),
    row("parts", "shown load", Acquire, &[
        ("cbindings/src/parts.c", "take_part", "atomic_load_explicit(&bell_of(l, r->at)->shown, memory_order_acquire)"),
        (PARTS, "Shown", "b.bells[slot].shown.Load()"),
    ]),
    row("held", "tail swap", Release, PUSH_TAIL),
    row("held", "tail load", Acquire, PENDING_TAIL),
    row("held", "word cas", Relaxed, END_CAS),
    row("held", "reclaim cas", Release, &[(BOARD, "Reclaim", "b.words[slot].CompareAndSwap(uint64(old)")]),
    row("held", "word load", Acquire, WORD_LOAD),
    row("state", "word cas", Release, END_CAS),
    row("state", "word load", Acquire, WORD_LOAD),
    row("state", "tail swap", Release, PUSH_TAIL),
    row("state", "tail load", Acquire, PENDING_TAIL),
    row("state", "mail store", Release, POST_TAIL),
    row("state", "mail load", Acquire, MAIL_TAIL),
    row("version", "current store", SeqCst, &[(PUBLISHER, "publish", "atomic_store(&words->current")]),
    row("version", "current load", SeqCst, &[("cbindings/src/weights.h", "rb_weights_in_force", "atomic_load(&l->words->current)")]),
    row("version", "in_use store", SeqCst, IN_USE_STORE),
    row("version", "in_use clear", Release, IN_USE_CLEAR),
    row("version", "in_use load", SeqCst, IN_USE_LOAD),
    row("refused", "good store", SeqCst, &[(PUBLISHER, "publish", "atomic_store(&words->good, before)")]),
    row("refused", "good load", SeqCst, &[("cbindings/src/weights.h", "rb_weights_in_force", "atomic_load(&l->words->good)")]),
    row("refused", "in_use store", SeqCst, IN_USE_STORE),
    row("refused", "in_use clear", Release, IN_USE_CLEAR),
    row("refused", "in_use load", SeqCst, IN_USE_LOAD),
];

/// The bodies of the functions with this name: from a line that begins a definition to the next line that begins with }.
fn bodies<'a>(text: &'a str, name: &str) -> Vec<&'a str> {
    let begins = |line: &str| {
        let call = format!("{name}(");
        let at = line.find(&call).unwrap_or(usize::MAX);
        at != usize::MAX && !line.starts_with([' ', '\t', '/', '*']) && !line.trim_end().ends_with(';') && !line[..at].ends_with('_')
    };
    let mut found = Vec::new();
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        if begins(line) {
            let one_line = line.trim_end().ends_with('}');
            let end = if one_line { line.len() } else { text[at..].find("\n}").unwrap_or(0) };
            found.push(&text[at..at + end]);
        }
        at += line.len();
    }
    found
}

/// Names the rows whose code is gone or has changed, and counts them.
pub fn missing_code() -> usize {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..");
    let mut bad = 0;
    for row in ROWS {
        for (file, function, piece) in row.code {
            let text = std::fs::read_to_string(root.join(file)).unwrap_or_default();
            if !bodies(&text, function).iter().any(|b| b.contains(piece)) {
                println!("BAD {} {}: {file} has no function {function} with {piece:?}", row.check, row.access);
                bad += 1;
            }
        }
    }
    bad
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The life of a slot: doorbells, deaths, requeues and generations.
 *
 * 2 clients, 2 workers, 3 slots, 1 broker and an adversary that kills whom it
 * likes at any step. Every access to shared memory is one step; what happens
 * in one process's private memory is folded into the step before it. The names
 * are those of the code: see README.md beside this file for who is who.
 *
 * What is checked:
 *   - every generation ends exactly once                         (End)
 *   - a client reads the output that belongs to its request      (Look)
 *   - the state of a sequence advances if and only if the
 *     answer of its step was delivered                           (Look, Claim)
 *   - no worker writes into a slot that moved on                 (WriteOutput)
 *   - an honest client is never thrown out                       (Commit)
 *   - nobody sleeps for ever: no invalid end state
 *   - when all is over, the books are empty                      (Broker, timeout)
 *
 * The budgets below bound a run; each run of check.sh spends others.
 */
#ifndef REQUESTS0
#define REQUESTS0 1     /* commits of client 0, which has two slots */
#endif
#ifndef REQUESTS1
#define REQUESTS1 1     /* commits of client 1, which has one */
#endif
#ifndef WORKER_DEATHS
#define WORKER_DEATHS 0
#endif
#ifndef CLIENT_DEATHS
#define CLIENT_DEATHS 0
#endif
#ifndef CANCELS
#define CANCELS 0
#endif
#ifndef EXPIRIES
#define EXPIRIES 0      /* deadlines that pass while a request runs */
#endif
#ifndef LEASES
#define LEASES 0        /* batches that outlive their lease */
#endif
#ifndef FAILURES
#define FAILURES 0      /* batches that fail as a whole */
#endif
#define MAX_ATTEMPTS 2

#define SLOTS 3
#define CLIENTS 2
#define WORKERS 2
#define owner(s) (s / 2)                /* client 0 has slots 0 and 1, client 1 has slot 2 */
#define first(c) (c * 2)
#define last(c) (c + 1)                 /* of client 0: 1; of client 1: 2 */

#define RING 6                          /* capacity of the commit ring: cancel, commit, cancel for each slot */

/* ArmedAt only matters in relation to Tail, so that is what is kept of it: */
#define NEVER 0                         /* ArmedAt is another number */
#define NEXT 1                          /* ArmedAt == Tail: the next entry is to be rung for */
#define LAST 2                          /* ArmedAt == Tail-1: the entry pushed last is */
#define moved(armed) (armed == NEXT -> LAST : NEVER)    /* when Tail moves on */

/* ---- shared memory ---- */

typedef Word { byte gen; bool held; bool ok }
Word board[SLOTS];                      /* Word: how the request of generation gen ended */

/* A futex word. changed: the count is no longer what its reader saw; it only
   matters while somebody is between that and its wait (about). */
typedef Futex { bool about, changed; byte asleep }      /* asleep: bitmap of waiters */
Futex bell[CLIENTS];                    /* Bell of each window */
Futex mailbell[WORKERS];                /* Mailbox.Bell */

typedef Commits { byte armed, n; byte entry[RING] }
Commits commits[CLIENTS];               /* ring of each client: ArmedAt, Tail-Head, the entries between */
bool doorbell[CLIENTS];                 /* eventfds: an event is pending */

typedef Mail { byte slots; byte gen[SLOTS] }
Mail mail[WORKERS];                     /* the mailbox, one deep */
bool posted[WORKERS];                   /* Mailbox.Tail is ahead of the worker */
bool parked[WORKERS], taken[WORKERS];
bool done[WORKERS];                     /* Done ring: an entry is there */
bool whole[WORKERS];                    /* Done.Whole: that batch failed as a whole */
byte darmed[WORKERS];                   /* its ArmedAt */
bool wdoorbell[WORKERS];

/* ---- the kernel ---- */

bool ckill[CLIENTS], cdead[CLIENTS];
bool wkill[WORKERS], wdead[WORKERS], wsignal[WORKERS];  /* signal: SIGKILL sent, not yet felt */

/* ---- private to clients (here so that others' assertions can look) ---- */

mtype = { FREE, COMMITTED, ABANDONED };
mtype cstate[SLOTS] = FREE;
byte cgen[SLOTS];
byte output[SLOTS];                     /* the payload: the new state, which tells all inputs that it came from */
byte budget[CLIENTS];

/* ---- state: each slot is a sequence, whose steps are its requests ---- */

#define FRESH 2                         /* in a step word: the step reads zeros */
byte half[SLOTS * 2];                   /* the two states of each slot */
byte step[SLOTS] = FRESH;               /* the step word: which half the step reads */
byte delivered[SLOTS];                  /* not in the code: the state after the last delivered step */

#define TORN 255
#define after(old, g) (old * 4 + g)     /* stands for hash(state, input); an answer is the new state */
#define old(k) half[k * 2 + (step[k] & 1)]
#ifdef STATE_IN_PLACE
#define new(k) old(k)
#define flipped(k) (step[k] & 1)
#else
#define new(k) half[k * 2 + 1 - (step[k] & 1)]
#define flipped(k) (1 - (step[k] & 1))
#endif

/* ---- private to the broker: the books ---- */

mtype = { IDLE, QUEUED, RUNNING, HELD };
mtype state[SLOTS] = IDLE;
byte gen[SLOTS], by[SLOTS], attempts[SLOTS];
Mail books[WORKERS];                    /* its own copy of what it posted */
bool attached[WORKERS] = true, dying[WORKERS];
bool left[CLIENTS], window[CLIENTS] = true;     /* window: leased */
bool touched;                           /* something happened outside the rings: decide */

byte worker_deaths = WORKER_DEATHS, client_deaths = CLIENT_DEATHS;
byte cancels = CANCELS, expiries = EXPIRIES, leases = LEASES, failures = FAILURES;

#define bitset(m, i) ((m >> (i)) & 1)
#define COMMIT 1
#define CANCEL 2
#define pack(kind, s, g) (kind + (s) * 4 + (g) * 16)
#define kindof(e) (e & 3)
#define slotof(e) ((e >> 2) & 3)
#define genof(e) (e >> 4)

/* ---- steps that several take ---- */

/* End: moves the word to this generation's end, unless somebody did already. */
inline End(k, number, isok, isheld, won) {
    d_step {
        won = false;
        if
#ifdef NO_GENERATION
        :: true ->
#else
        :: number > board[k].gen ->
#endif
            assert(number > board[k].gen);  /* exactly one end for each generation */
            board[k].gen = number; board[k].ok = isok; board[k].held = isheld; won = true
        :: else
        fi
    }
}

/* Ring: add one, wake the one waiter that the word has. One step: the one who
   waits between the two sees the new count and does not sleep. */
inline Ring(c) {
#ifdef ONE_BELL                         /* both clients wait on one word */
    atomic {
        bell[0].changed = bell[0].about; bell[1].changed = bell[1].about;
        if
        :: bitset(bell[0].asleep, 0) -> bell[0].asleep = bell[0].asleep & 2
        :: bitset(bell[0].asleep, 1) -> bell[0].asleep = bell[0].asleep & 1
        :: bell[0].asleep == 0
        fi
    }
#else
    d_step { bell[c].changed = bell[c].about; bell[c].asleep = 0 }
#endif
}

/* ---- client ---- */

/* Push: entry and Tail, then look whether the broker is armed for it. */
inline Store(c, e) {
    assert(commits[c].n < RING);
    commits[c].entry[commits[c].n] = e; commits[c].n++;
    commits[c].armed = moved(commits[c].armed)
}
inline RingIfArmed(c) {
    d_step { if :: commits[c].armed == LAST -> doorbell[c] = true; commits[c].armed = NEVER :: else fi }
}

/* Look: read the words of what is committed, and the output of what ended. */
inline Look(c, s, found) {
    d_step {
#ifndef SEEN_LATE
        bell[c].about = true;                               /* seen: the bell's count, before the words */
#endif
        found = false;
        s = first(c);
        do
        :: s > last(c) -> break
        :: else ->
            if
            :: cstate[s] == COMMITTED && board[s].gen == cgen[s] ->
                found = true;
                if
                :: board[s].ok ->
                    assert(output[s] == after(delivered[s], cgen[s]));
                    delivered[s] = output[s]; step[s] = flipped(s)
#ifdef FLIP_ALWAYS
                :: else -> step[s] = flipped(s)
#else
                :: else
#endif
                fi;
                output[s] = 0; board[s].ok = false;         /* nobody looks again */
                cstate[s] = (board[s].held -> ABANDONED : FREE)
            :: else
            fi;
            s++
        od;
        s = 0
    }
}

#ifdef ONE_BELL
#define word_of(c) 0
#else
#define word_of(c) c
#endif

#define reclaimed(s) (cstate[s] == ABANDONED && board[s].gen == cgen[s] && !board[s].held)
#define is(c, st) (cstate[first(c)] == st || (c == 0 && cstate[1] == st))

/* Reclaimed: the client gave this step up. A late answer is not delivered. */
inline Reclaimed(k) {
#ifdef FLIP_GIVEN_UP
    if :: board[k].ok -> step[k] = flipped(k) :: else fi;
#endif
    cstate[k] = FREE; output[k] = 0; board[k].ok = false
}

proctype Client(byte c) {
    byte s; bool found;
live:
    {
        do
        :: atomic { budget[c] > 0 && is(c, FREE) ->       /* claim, write, commit */
                if
                :: cstate[first(c)] == FREE -> s = first(c)
                :: c == 0 && cstate[0] != FREE -> s = 1
                fi;
                assert(step[s] & FRESH && delivered[s] == 0 || !(step[s] & FRESH) && old(s) == delivered[s]);
                budget[c]--; cgen[s]++; cstate[s] = COMMITTED; output[s] = 0;
                Store(c, pack(COMMIT, s, cgen[s])); s = 0 };
            RingIfArmed(c)
        :: atomic { cancels > 0 && is(c, COMMITTED) ->      /* cancel */
                if
                :: cstate[first(c)] == COMMITTED -> s = first(c)
                :: c == 0 && cstate[1] == COMMITTED -> s = 1
                fi;
                cancels--; cstate[s] = ABANDONED;
                Store(c, pack(CANCEL, s, cgen[s])); s = 0 };
            RingIfArmed(c)
        :: atomic { is(c, COMMITTED) -> Look(c, s, found) };        /* wait, read, release */
#ifdef SEEN_LATE
            bell[c].about = true;
#endif
            d_step {                                        /* FUTEX_WAIT */
                if
                :: found || bell[c].changed
                :: else -> bell[word_of(c)].asleep = bell[word_of(c)].asleep | (1 << c)
                fi; found = false; bell[c].about = false; bell[c].changed = false
            };
            !bitset(bell[word_of(c)].asleep, c)
        :: d_step { reclaimed(first(c)) -> Reclaimed(first(c)) }
        :: d_step { c == 0 && reclaimed(1) -> Reclaimed(1) }
        :: atomic { budget[c] == 0 && cstate[first(c)] == FREE && (c == 1 || cstate[1] == FREE) -> break }
        od
    } unless { ckill[c] };
    atomic {
        s = 0; found = false; bell[c].about = false; bell[c].changed = false;
        bell[word_of(c)].asleep = bell[word_of(c)].asleep & ~(1 << c);
        cdead[c] = true                                     /* pidfd, or the connection's end */
    };
    if
    :: atomic { ckill[c] && !window[c] ->                   /* a successor gets the same window */
        ckill[c] = false; cdead[c] = false; left[c] = false; window[c] = true;
        commits[c].n = 0; commits[c].armed = NEXT; doorbell[c] = false;
        commits[c].entry[0] = 0; commits[c].entry[1] = 0; commits[c].entry[2] = 0;
        commits[c].entry[3] = 0; commits[c].entry[4] = 0; commits[c].entry[5] = 0;
        if
        :: c == 0 && gen[0] < gen[1] -> gen[0] = gen[1]
        :: c == 0 && gen[0] > gen[1] -> gen[1] = gen[0]     /* one generation for all of it */
        :: else
        fi;
        s = first(c);
        do
        :: s > last(c) -> s = 0; break
        :: else ->
            cstate[s] = FREE; cgen[s] = gen[s]; delivered[s] = 0;
#ifndef NO_FRESH
            step[s] = FRESH;                                /* the halves are still its predecessor's */
#endif
            board[s].gen = gen[s]; board[s].held = false; board[s].ok = true;   /* Reset */
            s++
        od;
        goto live }
    :: !ckill[c]                                            /* closed */
    fi
}

/* ---- worker ---- */

/* The slot is this worker's, for this generation, and its client keeps off. */
#define writable(w, k) (by[k] == w && gen[k] == mail[w].gen[k] && (state[k] == RUNNING || state[k] == HELD) && \
        (cdead[owner(k)] || cgen[k] == mail[w].gen[k] && cstate[k] != FREE))

/* BeginStep: a worker that dies from here on leaves a torn half. */
inline BeginStep(w, k) {
    assert(writable(w, k));
    if :: step[k] & FRESH -> old(k) = 0 :: else fi;
#ifndef STATE_IN_PLACE
    new(k) = TORN
#endif
}

inline WriteOutput(w, k) {
    assert(writable(w, k));
    new(k) = after(old(k), mail[w].gen[k]);
    output[k] = new(k)
}

inline ClearMail(w) {
    mail[w].slots = 0; mail[w].gen[0] = 0; mail[w].gen[1] = 0; mail[w].gen[2] = 0
}

proctype Worker(byte w) {
    byte todo; bool won;
    goto serve;
attach:
    atomic {
        !attached[w] && !wdead[w];
        taken[w] = false; posted[w] = false; done[w] = false; whole[w] = false; parked[w] = false;
        darmed[w] = NEVER; wdoorbell[w] = false;
        mailbell[w].changed = false; mailbell[w].asleep = 0;
        attached[w] = true; touched = true
    };
serve:
    {
        skip;
next:   atomic {                                            /* seen: Bell; then Tail */
            parked[w] = false; mailbell[w].changed = false; mailbell[w].about = false;
            if
            :: posted[w] ->                                 /* take: Taken, and leave out what ended meanwhile */
                posted[w] = false; taken[w] = true; todo = mail[w].slots;
                if :: board[0].gen >= mail[w].gen[0] -> todo = todo & 6 :: else fi;
                if :: board[1].gen >= mail[w].gen[1] -> todo = todo & 5 :: else fi;
                if :: board[2].gen >= mail[w].gen[2] -> todo = todo & 3 :: else fi;
                if :: bitset(todo, 0) -> BeginStep(w, 0) :: else fi;
                if :: bitset(todo, 1) -> BeginStep(w, 1) :: else fi;
                if :: bitset(todo, 2) -> BeginStep(w, 2) :: else fi;
                goto compute
            :: else -> mailbell[w].about = true; goto park
            fi
        };
compute:
        atomic {                                            /* WriteOutput */
            if :: bitset(todo, 0) -> WriteOutput(w, 0) :: else fi;
            if :: bitset(todo, 1) -> WriteOutput(w, 1) :: else fi;
            if :: bitset(todo, 2) -> WriteOutput(w, 2) :: else fi;
            if :: todo & 3 -> todo = todo + 16 :: else fi;  /* bells to ring */
            if :: bitset(todo, 2) -> todo = todo + 32 :: else fi
        };
#if FAILURES > 0
        if
        :: atomic { failures > 0 && todo ->                 /* FailAll: no words, only Done, and always a ring */
                failures--; todo = 0; ClearMail(w); taken[w] = false; whole[w] = true; done[w] = true; darmed[w] = moved(darmed[w]) };
#ifdef NO_RING_AFTER_FAILURE
            atomic { if :: darmed[w] == LAST -> wdoorbell[w] = true; darmed[w] = NEVER :: else fi; goto next }
#else
            atomic { wdoorbell[w] = true; if :: darmed[w] == LAST -> darmed[w] = NEVER :: else fi; goto next }
#endif
        :: skip
        fi;
#endif
        do                                                  /* Complete: words, then the bell, client by client */
        :: d_step { bitset(todo, 0) -> End(0, mail[w].gen[0], true, false, won); todo = todo - 1 }
        :: d_step { (todo & 3) == 2 -> End(1, mail[w].gen[1], true, false, won); todo = todo - 2 }
        :: atomic { (todo & 19) == 16 -> Ring(0); todo = todo - 16 }
        :: d_step { (todo & 23) == 4 -> End(2, mail[w].gen[2], true, false, won); todo = todo - 4 }
        :: atomic { (todo & 55) == 32 -> Ring(1); todo = todo - 32 }
        :: atomic { todo == 0 ->                            /* Push of Done: entry and Tail … */
                won = false; ClearMail(w); taken[w] = false; done[w] = true; darmed[w] = moved(darmed[w]); break }
        od;
        atomic { if :: darmed[w] == LAST -> wdoorbell[w] = true; darmed[w] = NEVER :: else fi; goto next };    /* … then look at ArmedAt */

park:   /* Mailbox.Wait: store Parked, then load Tail; FUTEX_WAIT looks at Bell once more */
#ifdef PARK_SWAPPED
        won = posted[w];
        atomic { parked[w] = true; if :: won -> won = false; goto next :: else fi };
        atomic { if :: mailbell[w].changed -> goto next :: else -> mailbell[w].asleep = 1; mailbell[w].about = false fi };
#else
        parked[w] = true;
        atomic { if :: posted[w] || mailbell[w].changed -> goto next :: else -> mailbell[w].asleep = 1; mailbell[w].about = false fi };
#endif
end_parked:
        atomic { mailbell[w].asleep == 0 -> goto next }
    } unless { wkill[w] };
    atomic {
        todo = 0; won = false;
        wkill[w] = false; wsignal[w] = false; mailbell[w].asleep = 0; mailbell[w].about = false; mailbell[w].changed = false;
        wdead[w] = true                                     /* pidfd */
    };
    goto attach
}

/* ---- broker ---- */

/* The broker's handlers are one step each between the points where their
   order matters: ArmedAt, Tail, Parked. */

inline Free(k) {
    state[k] = IDLE; attempts[k] = 0; by[k] = 0;
    if
    :: left[owner(k)] && state[first(owner(k))] == IDLE && state[last(owner(k))] == IDLE -> window[owner(k)] = false
    :: else
    fi
}

/* Reclaim: the worker is done with a slot whose request ended before. */
inline Reclaim(k) {
    if
    :: !left[owner(k)] ->
        if :: board[k].gen == gen[k] -> board[k].held = false :: else fi;
        Ring(owner(k))
    :: else
    fi;
    Free(k)
}

/* EndRunning: the caller is let go, the slot is held until its worker is done. */
inline EndRunning(k) {
#ifdef NO_HELD
    End(k, gen[k], false, false, won);
#else
    End(k, gen[k], false, true, won);
#endif
    state[k] = HELD;
    Ring(owner(k))
}

#define given(w, k) (bitset(books[w].slots, k) && gen[k] == books[w].gen[k] && by[k] == w && (state[k] == RUNNING || state[k] == HELD))
#ifdef NO_GENERATION_DONE
#define finished(w, k) (bitset(books[w].slots, k) && (state[k] == RUNNING || state[k] == HELD))
#else
#define finished(w, k) given(w, k)
#endif

/* RetryFailed: a request of a batch that failed as a whole is tried again, or that is its answer. */
inline RetryFailed(k) {
    if
    :: state[k] = QUEUED; by[k] = 0
    :: End(k, gen[k], false, false, won); Ring(owner(k)); Free(k)
    fi
}

#define failed(w, k) (whole[w] && board[k].gen != gen[k])

inline FinishRequest(w, k) {
    if
    :: finished(w, k) && state[k] == HELD -> Reclaim(k)
    :: finished(w, k) && state[k] == RUNNING && failed(w, k) -> RetryFailed(k)
    :: finished(w, k) && state[k] == RUNNING && !failed(w, k) -> assert(board[k].gen == gen[k]); Free(k)
    :: else
    fi
}

inline ForgetMail(w) {
    books[w].slots = 0; books[w].gen[0] = 0; books[w].gen[1] = 0; books[w].gen[2] = 0
}

inline DrainDone(w) {
    if
    :: done[w] ->
        done[w] = false;
        FinishRequest(w, 0); FinishRequest(w, 1); FinishRequest(w, 2);
        whole[w] = false;
        ForgetMail(w)
    :: else
    fi
}

/* Orphan: a dead worker's request was answered, is tried again, or given up. */
inline Orphan(w, k) {
    if
    :: given(w, k) && state[k] == HELD -> Reclaim(k)
    :: given(w, k) && state[k] == RUNNING && board[k].gen == gen[k] ->
#ifndef NO_RING_AFTER_DEATH
        Ring(owner(k));                                  /* it may have died before its ring */
#endif
        Free(k)
    :: given(w, k) && state[k] == RUNNING && board[k].gen != gen[k] ->
        attempts[k] = attempts[k] + taken[w];
        if
        :: attempts[k] >= MAX_ATTEMPTS -> End(k, gen[k], false, false, won); Ring(owner(k)); Free(k)
        :: else -> state[k] = QUEUED; by[k] = 0
        fi
    :: else
    fi
}

inline TakeBack(w) {
    DrainDone(w);
    Orphan(w, 0); Orphan(w, 1); Orphan(w, 2);
    ForgetMail(w)
}

/* Arm: store ArmedAt = head, then load Tail. more: an entry is there already. */
inline ArmStore(word, pending) { word = (pending == 0 -> NEXT : (pending == 1 -> LAST : NEVER)) }
inline ArmLoad(pending) { more = more || pending > 0 }

/* Follow: the worker answered before its "done" was read; the board says so. */
inline Follow(k) {
    if :: by[k] == 0 -> DrainDone(0) :: else -> DrainDone(1) fi;
    if
    :: (state[k] == RUNNING || state[k] == HELD) && board[k].gen == gen[k] && !board[k].held -> Free(k)
    :: else
    fi
}

inline ReadCommit(c) {
    e = commits[c].entry[0]; s = slotof(e); commits[c].n--;
    commits[c].entry[0] = commits[c].entry[1]; commits[c].entry[1] = commits[c].entry[2];
    commits[c].entry[2] = commits[c].entry[3]; commits[c].entry[3] = commits[c].entry[4];
    commits[c].entry[4] = commits[c].entry[5]; commits[c].entry[5] = 0;
    if
    :: kindof(e) == COMMIT ->
        if :: state[s] == RUNNING || state[s] == HELD -> Follow(s) :: else fi;
        assert(state[s] == IDLE && genof(e) == gen[s] + 1);         /* check */
        gen[s] = genof(e); state[s] = QUEUED; attempts[s] = 0
    :: kindof(e) == CANCEL && gen[s] == genof(e) && state[s] == QUEUED ->
        End(s, gen[s], false, false, won); Ring(c); Free(s)
    :: kindof(e) == CANCEL && gen[s] == genof(e) && state[s] == RUNNING -> EndRunning(s)
    :: else
    fi;
    e = 0; s = 0; won = false
}

inline ReadAll(c) {
    do
    :: commits[c].n > 0 -> ReadCommit(c)
    :: else -> break
    od
}

inline ReadCommits(c) {
    do
#ifdef ARM_SWAPPED
    :: ArmLoad(commits[c].n);
        atomic { ArmStore(commits[c].armed, commits[c].n); if :: more -> more = false; ReadAll(c) :: else -> break fi }
#else
    :: d_step { ArmStore(commits[c].armed, commits[c].n) };
        atomic { ArmLoad(commits[c].n); if :: more -> more = false; ReadAll(c) :: else -> break fi }
#endif
    od
}

inline LeaveSlot(k) {
    if
    :: state[k] == QUEUED -> state[k] = IDLE; attempts[k] = 0
    :: state[k] == RUNNING && board[k].gen == gen[k] && !board[k].held -> Free(k)    /* it has its answer */
    :: state[k] == RUNNING && !(board[k].gen == gen[k] && !board[k].held) -> End(k, gen[k], false, true, won); state[k] = HELD
    :: else
    fi
}

inline ClientLeft(c) {
    DrainDone(0); DrainDone(1);
    LeaveSlot(first(c));
    if :: c == 0 -> LeaveSlot(1) :: else fi;
    won = false; left[c] = true; doorbell[c] = false;
    if :: state[first(c)] == IDLE && state[last(c)] == IDLE -> window[c] = false :: else fi
}

#define waits(s) (state[s] == QUEUED)
#define fresh(s) (state[s] == QUEUED && attempts[s] == 0)
#define ready(w) (attached[w] && !dying[w] && books[w].slots == 0)
#define somewait (waits(0) || waits(1) || waits(2))
#define someheld (state[0] == HELD || state[1] == HELD || state[2] == HELD)

inline Put(w, k) {
    books[w].slots = books[w].slots | (1 << k); books[w].gen[k] = gen[k];
    mail[w].gen[k] = gen[k]; state[k] = RUNNING; by[k] = w
}

inline Dispatch(w) {
    if                                                      /* one alone, or all that may share */
    :: waits(0) -> Put(w, 0)
    :: !waits(0) && waits(1) -> Put(w, 1)
    :: !waits(0) && !waits(1) -> Put(w, 2)
    :: fresh(0) + fresh(1) + fresh(2) > 1 ->
        if :: fresh(0) -> Put(w, 0) :: else fi;
        if :: fresh(1) -> Put(w, 1) :: else fi;
        if :: fresh(2) -> Put(w, 2) :: else fi
    fi;
    mail[w].slots = books[w].slots; taken[w] = false;
    posted[w] = true                                        /* Post: Tail … */
}

/* … then Bell, then look at Parked */
inline Poke(w) {
#ifdef PARK_SWAPPED
    won = parked[w];
    d_step { mailbell[w].changed = mailbell[w].about; if :: won -> mailbell[w].asleep = 0 :: else fi; won = false }
#else
    d_step { mailbell[w].changed = mailbell[w].about; if :: parked[w] -> mailbell[w].asleep = 0 :: else fi }
#endif
}

#define armable(w) ((somewait || someheld) && books[w].slots)

inline Kill(w) {
    leases--;
    DrainDone(w);
    if
    :: books[w].slots ->
        dying[w] = true; wsignal[w] = true;
#ifdef RECYCLE_EARLY
        TakeBack(w)
#endif
    :: else
    fi
}

inline Expire(k) {
    expiries--;
    DrainDone(0); DrainDone(1);
    if
    :: state[k] == RUNNING -> EndRunning(k)
    :: else
    fi;
    won = false
}

inline WorkerDead(w) {
    TakeBack(w);
    attached[w] = false; dying[w] = false; wdead[w] = false; wsignal[w] = false; won = false;
    ClearMail(w)
}

proctype Broker() {
    byte s, e; bool won, more;
end_loop:
    if
    :: atomic { touched -> touched = false; goto decide }
    :: atomic { doorbell[0] && !left[0] -> doorbell[0] = false; ReadAll(0) }; ReadCommits(0)
    :: atomic { doorbell[1] && !left[1] -> doorbell[1] = false; ReadAll(1) }; ReadCommits(1)
    :: atomic { wdoorbell[0] -> wdoorbell[0] = false; goto decide }
    :: atomic { wdoorbell[1] -> wdoorbell[1] = false; goto decide }
    :: atomic { cdead[0] && !left[0] -> ClientLeft(0); goto decide }
    :: atomic { cdead[1] && !left[1] -> ClientLeft(1); goto decide }
    :: atomic { attached[0] && wdead[0] -> WorkerDead(0); goto decide }
    :: atomic { attached[1] && wdead[1] -> WorkerDead(1); goto decide }
    :: atomic { leases > 0 && books[0].slots && !dying[0] -> Kill(0); goto decide }
    :: atomic { leases > 0 && books[1].slots && !dying[1] -> Kill(1); goto decide }
    :: atomic { expiries > 0 && state[0] == RUNNING -> Expire(0); goto decide }
    :: atomic { expiries > 0 && state[1] == RUNNING -> Expire(1); goto decide }
    :: atomic { expiries > 0 && state[2] == RUNNING -> Expire(2); goto decide }
    :: atomic { timeout -> goto over }
    fi;
decide:
    atomic {
        DrainDone(0); DrainDone(1);
        if
        :: somewait && ready(0) -> Dispatch(0); goto poke0
        :: somewait && !ready(0) && ready(1) -> Dispatch(1); goto poke1
        :: else -> goto arm
        fi
    };
poke0:
    Poke(0); goto decide;
poke1:
    Poke(1); goto decide;
arm:                                                        /* armDone */
    atomic { if :: armable(0) -> ArmStore(darmed[0], done[0]) :: else -> goto arm1 fi };
    atomic { ArmLoad(done[0]) };
arm1:
    atomic { if :: armable(1) -> ArmStore(darmed[1], done[1]) :: else -> goto armed fi };
    atomic { ArmLoad(done[1]) };
armed:
    atomic { if :: more -> more = false; goto decide :: else -> goto end_loop fi };
over:
    atomic {                                                /* nobody can move: the books are empty */
        DrainDone(0); DrainDone(1);
        assert(state[0] == IDLE && state[1] == IDLE && state[2] == IDLE);
        assert(!window[0] && !window[1]);
        assert(books[0].slots == 0 && books[1].slots == 0)
    }
}

/* ---- the killer ---- */

proctype Adversary() {
end_adversary:
    do
    :: d_step { worker_deaths > 0 && attached[0] && !wkill[0] && !wdead[0] -> worker_deaths--; wkill[0] = true }
    :: d_step { worker_deaths > 0 && attached[1] && !wkill[1] && !wdead[1] -> worker_deaths--; wkill[1] = true }
    :: d_step { client_deaths > 0 && !ckill[0] && !cdead[0] -> client_deaths--; ckill[0] = true }
    :: d_step { client_deaths > 0 && !ckill[1] && !cdead[1] -> client_deaths--; ckill[1] = true }
    :: d_step { wsignal[0] && !wdead[0] -> wsignal[0] = false; wkill[0] = true }
    :: d_step { wsignal[1] && !wdead[1] -> wsignal[1] = false; wkill[1] = true }
    od
}

init {
    atomic { commits[0].armed = NEXT; commits[1].armed = NEXT; budget[0] = REQUESTS0; budget[1] = REQUESTS1; run Broker(); run Client(0); run Client(1); run Worker(0); run Worker(1); run Adversary() }
}

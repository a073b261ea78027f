/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads of one client that wait, in C (cbindings/src/waiting.c) and in Go
 * (client/waiting.go): one leads and parks on the window's bell, the others
 * follow, each on a word of its own slot. This is the only way that a request's
 * end takes to the thread that waits for it.
 *
 *   THREADS   threads, each with one request after the other
 *   REQUESTS  of each thread
 *   TIMEOUTS  waits that end by themselves, before their request does
 *
 * A futex word is a count; FUTEX_WAIT with the count that was seen is one step:
 * it sleeps unless the count has changed.
 */
#ifndef THREADS
#define THREADS 2
#endif
#ifndef REQUESTS
#define REQUESTS 1
#endif
#ifndef TIMEOUTS
#define TIMEOUTS 0
#endif

byte bell;             /* the window's, rung by the worker */
bool word[THREADS];    /* on the board: this slot's request has ended */
bool sent[THREADS];    /* it was committed, and no worker has it yet */
byte wake[THREADS];    /* a follower sleeps on its own */
bool follow[THREADS];  /* under mu, as is leading */
bool leading;
bool mu;
byte timeouts = TIMEOUTS;
byte finished;

inline lock() { atomic { !mu -> mu = true } }
inline unlock() { mu = false }

/* Takes a follower off the list and wakes it. The caller holds mu. */
inline poke(i)
{
	atomic { follow[i] = false; wake[i]++ }
}

/* Has some follower try for the lead. The caller holds mu. */
inline promote()
{
	atomic {
#ifndef NO_PROMOTE
		if
		:: !leading ->
			n = 0;
			do
			:: n < THREADS && follow[n] -> follow[n] = false; wake[n]++; n = THREADS
			:: n < THREADS && !follow[n] -> n++
			:: n >= THREADS -> break
			od
		:: else -> skip
		fi;
#endif
		n = 0
	}
}

/* Pokes the followers whose requests have ended. */
inline wake_ended()
{
	lock();
	n = 0;
	do
	:: n < THREADS && follow[n] && word[n] -> poke(n); n++
	:: n < THREADS && !(follow[n] && word[n]) -> n++
	:: n == THREADS -> break
	od;
	n = 0;
	unlock()
}

proctype Thread(byte me)
{
	byte requests = REQUESTS, seen, n = 0;
	bool late;
	do
	:: requests == 0 -> break
	:: else ->
		requests--;
		late = false;
		atomic { word[me] = false; sent[me] = true } /* commit */
await:
		if
		:: word[me] -> goto ended
		:: else
		fi;
		lock();
		if
		:: !leading ->
			leading = true;
			unlock();
			goto lead
		:: else
		fi;
		seen = wake[me];
		follow[me] = true;
		unlock();
		/* Who pokes may have looked before we were listed: without this look
		 * it would be noticed with the leader's own end at the latest. */
		if
		:: word[me] -> goto awake
		:: else
		fi;
		if
		:: wake[me] != seen
		:: atomic { timeouts > 0 -> timeouts--; late = true }
		fi;
awake:
		lock();
		follow[me] = false;
		if
		:: word[me] || late -> promote() /* perhaps it was the lead that we were woken for */
		:: else
		fi;
		unlock();
		if
		:: late && !word[me] -> late = false /* the caller looks around, and waits again */
		:: else
		fi;
		goto await;
lead:
#ifdef SEEN_LATE
		wake_ended();
		if
		:: word[me] -> goto resign
		:: else
		fi;
		seen = bell;
#else
		seen = bell;
		wake_ended();
		if
		:: word[me] -> goto resign
		:: else
		fi;
#endif
		if
		:: bell != seen -> goto lead
		:: atomic { timeouts > 0 -> timeouts--; late = true }
		fi;
resign:
		lock();
		leading = false;
		promote();
		unlock();
		if
		:: late && !word[me] -> late = false; goto await
		:: else
		fi;
ended:
		skip
	od;
	finished++
}

/* Ends requests in any order, several before it rings once. */
proctype Worker()
{
	byte i;
end:	if
	:: sent[0] -> i = 0
	:: sent[THREADS - 1] -> i = THREADS - 1
	:: sent[1 % THREADS] -> i = 1 % THREADS
	fi;
	atomic { sent[i] = false; word[i] = true };
	if
	:: true -> bell++
	:: sent[0] || sent[THREADS - 1] || sent[1 % THREADS] /* one more before it rings */
		-> if
		   :: sent[0] -> atomic { sent[0] = false; word[0] = true }
		   :: sent[THREADS - 1] -> atomic { sent[THREADS - 1] = false; word[THREADS - 1] = true }
		   :: sent[1 % THREADS] -> atomic { sent[1 % THREADS] = false; word[1 % THREADS] = true }
		   fi;
		   bell++
	fi;
	goto end
}

init {
	byte t = 0;
	atomic {
		do
		:: t < THREADS -> run Thread(t); t++
		:: else -> break
		od;
		run Worker()
	};
	finished == THREADS; /* nobody sleeps for ever */
	assert(!leading && !mu)
}

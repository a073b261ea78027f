/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Live weights (shm/weights.go, cbindings/src/weights.c): a publisher writes versions
 * into buffers, followers read them, and no one holds a lock.
 *
 *   PUBLISHES  versions that publishers publish
 *   DEATHS     of publishers, at any step; the successor goes on
 *   FOLLOWERS  1 or 2
 *   REFUSALS   of a version, by a follower that cannot load it
 *
 * A buffer is two cells: a torn read sees two versions.
 */
#ifndef PUBLISHES
#define PUBLISHES 3
#endif
#ifndef DEATHS
#define DEATHS 0
#endif
#ifndef REFUSALS
#define REFUSALS 0
#endif
#define BUFFERS 4
#ifndef FOLLOWERS
#define FOLLOWERS 1
#endif
#define NONE 0

byte cell[8];                   /* two for each buffer: the version whose bytes they are */
byte version, buffer;           /* Current, one word; version 0: none */
byte goodversion, goodbuffer;   /* Good, one word */
byte last;                      /* Last */
byte refused[BUFFERS];          /* Refused: of each buffer, the latest version */
byte inuse[FOLLOWERS];          /* 1 + buffer */
byte published;                 /* the latest version whose publish has returned */
byte deaths = DEATHS, refusals = REFUSALS;
bool done, given;                /* given: a version was refused */

/* The version in force and its buffer: Current, or Good if that was refused. Each word is a load. */
inline InForce(v, b)
{
	atomic { v = version; b = buffer };
	if
	:: v <= refused[b] -> atomic { v = goodversion; b = goodbuffer };
		if
		:: v <= refused[b] -> v = NONE
		:: else -> skip
		fi
	:: else -> skip
	fi
}

proctype Publisher()
{
	byte b, i, v, beforev, beforeb;
	bool taken[BUFFERS];
again:
	do
	:: last >= PUBLISHES -> break
	:: else ->
		/* FreeBuffer: Current, Good, then each follower's word */
		atomic {
			i = 0;
			do
			:: i < BUFFERS -> taken[i] = false; i++
			:: else -> break
			od
		};
		if
		:: version != NONE -> taken[buffer] = true
		:: else -> skip
		fi;
		if
		:: goodversion != NONE -> taken[goodbuffer] = true
		:: else -> skip
		fi;
		i = 0;
		do
		:: i < FOLLOWERS ->
#ifndef IGNORE_IN_USE
			if
			:: inuse[i] != 0 -> taken[inuse[i] - 1] = true
			:: else -> skip
			fi;
#endif
			i++
		:: else -> break
		od;
		atomic {
			b = 0;
			do
			:: b < BUFFERS && taken[b] -> b++
			:: else -> break
			od
		};
		if
		:: b == BUFFERS -> goto again  /* all are read: look again */
		:: else -> skip
		fi;
		v = last + 1;
#ifdef ANNOUNCE_EARLY
		atomic { goodversion = version; goodbuffer = buffer };
		last = v;
		atomic { version = v; buffer = b };
#endif
		cell[2 * b] = v;
		if
		:: atomic { deaths > 0 -> deaths--; } goto again  /* dies here; its successor begins anew */
		:: true
		fi;
		cell[2 * b + 1] = v;
#ifndef ANNOUNCE_EARLY
		atomic { beforev = version; beforeb = buffer };
		last = v;
#ifdef GOOD_FIRST
		atomic { goodversion = beforev; goodbuffer = beforeb };
#endif
		if
		:: atomic { deaths > 0 -> deaths--; } goto again
		:: true
		fi;
		atomic { version = v; buffer = b };
		if
		:: atomic { deaths > 0 -> deaths--; } goto again
		:: true
		fi;
		if
		:: beforev > refused[beforeb] -> atomic { goodversion = beforev; goodbuffer = beforeb }
		:: else -> skip
		fi;
#endif
		published = v
	od;
	done = true
}

proctype Follower(byte me)
{
	byte v, b, v2, b2, first, promised, mine, gone;
	do
	:: done -> break
	:: else ->
		promised = published;
		do
		:: true ->
			InForce(v, b);
			if
			:: v == NONE ->
				inuse[me] = 0;
				assert(promised < 2 + DEATHS || REFUSALS > 1);  /* one refusal leaves the version before */
				goto next
			:: else -> skip
			fi;
			inuse[me] = b + 1;
#ifdef NO_SECOND_LOOK
			break
#else
			InForce(v2, b2);
			if
			:: v2 == v && b2 == b -> break
			:: else -> skip
			fi
#endif
		od;
		/* the batch runs: it reads its weights */
		first = cell[2 * b];
		assert(first == v);
		assert(cell[2 * b + 1] == v);            /* one batch, one version, never torn */
		assert(v >= promised || given);          /* as new as promised, unless withdrawn */
		assert(v >= mine || given);              /* never back */
		mine = v;
		assert(v != gone);
		if
		:: atomic { refusals > 0 -> refusals--; first = refused[b] };
			atomic {
				if
				:: first < v && refused[b] == first -> refused[b] = v; gone = v; given = true
				:: else -> skip /* another one was quicker */
				fi
			}
		:: true
		fi;
		inuse[me] = 0;
next:
		skip
	od
}

init {
	atomic {
		run Publisher();
		run Follower(0);
		if
		:: FOLLOWERS > 1 -> run Follower(1)
		:: else -> skip
		fi
	}
}

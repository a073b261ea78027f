// SPDX-License-Identifier: Apache-2.0
//! The programs: two to four processes, as threads, at one sync point. Each looks once instead of waiting in a loop: loom
//! tries every moment for the look. An assertion's text begins with "order: ".

use std::sync::Arc;

use loom::thread::spawn;

use crate::words::{Futex, Plain, Word};

pub const PROGRAMS: &[(&str, fn())] = &[
    ("header", header),
    ("entry", entry),
    ("arm", arm),
    ("mail", mail),
    ("bell", bell),
    ("end", end),
    ("parts", parts),
    ("held", held),
    ("state", state),
    ("version", version),
    ("refused", refused),
];

fn shared<const N: usize>(start: usize) -> [Arc<Word>; N] {
    std::array::from_fn(|_| Arc::new(Word::new(start)))
}

fn plain<const N: usize>() -> [Arc<Plain>; N] {
    std::array::from_fn(|_| Arc::new(Plain::new(0)))
}

/// A peer that sees the magic sees the header.
fn header() {
    let [magic] = shared(0);
    let [fields] = plain();
    let broker = spawn({
        let (magic, fields) = (magic.clone(), fields.clone());
        move || {
            fields.write(1);
            magic.store("magic store", 1);
        }
    });
    if magic.load("magic load") == 1 {
        assert_eq!(fields.read(), 1, "order: header");
    }
    broker.join().unwrap();
}

/// A ring with room for one entry, and two entries: each is read whole, and not overwritten before.
fn entry() {
    let [tail, head] = shared(0);
    let [place] = plain();
    let producer = spawn({
        let (tail, head, place) = (tail.clone(), head.clone(), place.clone());
        move || {
            for i in 0..2 {
                if i - head.load("head load") >= 1 {
                    break; // full
                }
                place.write(i + 1);
                tail.swap("tail swap", i + 1);
            }
        }
    });
    let mut taken = 0;
    for _ in 0..2 {
        if tail.load("tail load") > taken {
            taken += 1;
            assert_eq!(place.read(), taken, "order: another entry");
            head.store("head store", taken);
        }
    }
    producer.join().unwrap();
}

/// A push and a broker that goes to sleep: one sees the other.
fn arm() {
    let [tail] = shared(0);
    let [armed] = shared(9);
    let producer = spawn({
        let (tail, armed) = (tail.clone(), armed.clone());
        move || {
            tail.swap("tail swap", 1);
            armed.load("armed load") == 0
        }
    });
    armed.swap("armed swap", 0);
    let sleeps = tail.load("tail load") == 0;
    let rings = producer.join().unwrap();
    assert!(!sleeps || rings, "order: nobody rings the doorbell");
}

/// A mail and a worker that parks: the worker wakes, and a mail that it sees is whole.
fn mail() {
    let [tail, bell, parked] = shared(0);
    let [letter] = plain();
    let futex = Arc::new(Futex::new());
    let broker = spawn({
        let (tail, bell, parked, letter, futex) = (tail.clone(), bell.clone(), parked.clone(), letter.clone(), futex.clone());
        move || {
            letter.write(1);
            tail.store("tail store", 1);
            bell.add("bell add", 1);
            if parked.load("parked load") != 0 {
                futex.wake();
            }
        }
    });
    let seen = bell.load("bell load");
    parked.swap("parked swap", 1);
    if tail.load("tail load") == 1 {
        assert_eq!(letter.read(), 1, "order: mail");
    } else {
        futex.wait(&bell, seen);
    }
    broker.join().unwrap();
    assert!(!futex.sleeps(), "order: the worker sleeps through its mail");
}

/// A worker that has read the bell of a mail sees the mail, so that it does not park on that count. (The fence between
/// parked and tail would hide this in the program above: a fence orders the bell too, and two accesses do not.)
fn bell() {
    let [tail, bell] = shared(0);
    let broker = spawn({
        let (tail, bell) = (tail.clone(), bell.clone());
        move || {
            tail.store("tail store", 1);
            bell.add("bell add", 1);
        }
    });
    if bell.load("bell load") == 1 {
        assert_eq!(tail.load("tail load"), 1, "order: the mail of the bell");
    }
    broker.join().unwrap();
}

/// A client that sees the word sees the output, and may write the input anew. It does not sleep through the ring.
fn end() {
    let [word, bell] = shared(0);
    let [input, output] = plain();
    let futex = Arc::new(Futex::new());
    let worker = spawn({
        let (word, bell, input, output, futex) = (word.clone(), bell.clone(), input.clone(), output.clone(), futex.clone());
        move || {
            output.write(input.read() + 1);
            word.cas("word cas", 0, 1);
            bell.add("bell add", 1);
            futex.wake();
        }
    });
    let seen = bell.load("bell load");
    if word.load("word load") == 1 {
        assert_eq!(output.read(), 1, "order: output");
        input.write(7);
    } else {
        futex.wait(&bell, seen);
    }
    worker.join().unwrap();
    assert!(!futex.sleeps(), "order: the client sleeps through the end of its request");
}

/// A client that sees a part's word sees its steps. It does not sleep through the ring.
fn parts() {
    let [shown, bell] = shared(0);
    let [step] = plain();
    let futex = Arc::new(Futex::new());
    let worker = spawn({
        let (shown, bell, step, futex) = (shown.clone(), bell.clone(), step.clone(), futex.clone());
        move || {
            step.write(1);
            shown.store("shown store", 1);
            bell.add("bell add", 1);
            futex.wake();
        }
    });
    let seen = bell.load("bell load");
    if shown.load("shown load") == 1 {
        assert_eq!(step.read(), 1, "order: step");
    } else {
        futex.wait(&bell, seen);
    }
    worker.join().unwrap();
    assert!(!futex.sleeps(), "order: the client sleeps through a part");
}

/// The broker ends a request that a worker has. The client uses the slot again when the held bit is gone.
fn held() {
    const HELD: usize = 3;
    let [word, tail] = shared(0);
    let [output] = plain();
    let worker = spawn({
        let (tail, output) = (tail.clone(), output.clone());
        move || {
            output.write(1);
            tail.swap("tail swap", 1);
        }
    });
    let broker = spawn({
        let word = word.clone();
        move || {
            word.cas("word cas", 0, HELD);
            if tail.load("tail load") == 1 {
                word.cas("reclaim cas", HELD, 1);
            }
        }
    });
    if word.load("word load") == 1 {
        output.write(2);
    }
    worker.join().unwrap();
    broker.join().unwrap();
}

/// Two steps of a sequence, by two workers: the second reads the half, and the parity, that the first one's answer allows.
fn state() {
    let [word, tail, mail] = shared(0);
    let [half, parity] = plain();
    let first = spawn({
        let (word, half) = (word.clone(), half.clone());
        move || {
            half.write(1);
            word.cas("word cas", 0, 1);
        }
    });
    let client = spawn({
        let (tail, parity) = (tail.clone(), parity.clone());
        move || {
            if word.load("word load") == 1 {
                parity.write(1);
                tail.swap("tail swap", 1);
            }
        }
    });
    let broker = spawn({
        let mail = mail.clone();
        move || {
            if tail.load("tail load") == 1 {
                mail.store("mail store", 1);
            }
        }
    });
    if mail.load("mail load") == 1 {
        assert_eq!((parity.read(), half.read()), (1, 1), "order: state");
    }
    first.join().unwrap();
    client.join().unwrap();
    broker.join().unwrap();
}

/// Version 1 in buffer 0 is in force; the publisher writes version 2 into buffer 1, then a later one into buffer 0, unless
/// the follower reads it. A word is the version, whose buffer is version - 1.
fn version() {
    let [current] = shared(1);
    let [in_use] = shared(0);
    let buffers: [Arc<Plain>; 2] = [Arc::new(Plain::new(1)), Arc::new(Plain::new(0))];
    let publisher = spawn({
        let (current, in_use, buffers) = (current.clone(), in_use.clone(), buffers.clone());
        move || {
            buffers[1].write(2);
            current.store("current store", 2);
            if in_use.load("in_use load") != 1 {
                buffers[0].write(3);
            }
        }
    });
    let word = current.load("current load");
    in_use.store("in_use store", word);
    if current.load("current load") == word {
        assert_eq!(buffers[word - 1].read(), word, "order: version");
    }
    in_use.store("in_use clear", 0);
    publisher.join().unwrap();
}

/// Version 3 was published and refused at once. The publisher makes version 2 the good one, and writes buffer 0, which
/// held version 1, the good one before, unless the follower reads it.
fn refused() {
    let [good] = shared(1);
    let [in_use] = shared(0);
    let buffers: [Arc<Plain>; 2] = [Arc::new(Plain::new(1)), Arc::new(Plain::new(2))];
    let publisher = spawn({
        let (good, in_use, buffers) = (good.clone(), in_use.clone(), buffers.clone());
        move || {
            good.store("good store", 2);
            if in_use.load("in_use load") != 1 {
                buffers[0].write(4);
            }
        }
    });
    let word = good.load("good load");
    in_use.store("in_use store", word);
    if good.load("good load") == word {
        assert_eq!(buffers[word - 1].read(), word, "order: good version");
    }
    in_use.store("in_use clear", 0);
    publisher.join().unwrap();
}

/* SPDX-License-Identifier: Apache-2.0 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "internal.h"

#define MESSAGE_BYTES 2048
#define MOST_OPTIONS 4096 /* bytes of a struct; a larger size was not set */

/*
 * Each thread's buffer for the text of an error, made at its first error. Not
 * a __thread array: thread-local memory of a library that is loaded late comes
 * from the C library's reserve. In a Python process with PyTorch the reserve has
 * less than 2 KiB left ("cannot allocate memory in static TLS block").
 */
static __thread char *own_message;
static pthread_key_t key;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Destructors of other keys may come after this one, and call us again. */
static void forget(void *text)
{
	own_message = NULL;
	free(text);
}

static void make_key(void) { pthread_key_create(&key, forget); }

static char *message(void)
{
	static char shared[MESSAGE_BYTES]; /* if there is no memory for the thread's buffer */
	if (!own_message) {
		pthread_once(&once, make_key);
		own_message = calloc(1, MESSAGE_BYTES);
		if (!own_message)
			return shared;
		pthread_setspecific(key, own_message); /* freed with the thread */
	}
	return own_message;
}

const char *rb_error(void) { return message(); }

/* The bytes of the UTF-8 character at text; 0 if there is none. */
static size_t character(const unsigned char *text, size_t left)
{
	unsigned char c = text[0];
	size_t n = c < 0x80 ? 1 : c < 0xc2 ? 0 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : c < 0xf5 ? 4 : 0;
	if (n > left)
		return 0;
	for (size_t i = 1; i < n; i++)
		if ((text[i] & 0xc0) != 0x80)
			return 0;
	if (n >= 3) { /* overlong forms, surrogates, and beyond U+10FFFF */
		unsigned second = text[1];
		if ((c == 0xe0 && second < 0xa0) || (c == 0xed && second > 0x9f) || (c == 0xf0 && second < 0x90) || (c == 0xf4 && second > 0x8f))
			return 0;
	}
	return n;
}

bool rb_valid_utf8(const char *text, size_t bytes)
{
	for (size_t n; bytes; text += n, bytes -= n)
		if (!(n = character((const unsigned char *)text, bytes)))
			return false;
	return true;
}

/* Names and reasons from other processes may be cut or damaged; rb_error is valid UTF-8. */
static void set_message(const char *text)
{
	char *to = message(), *end = to + MESSAGE_BYTES - 4;
	size_t left = strlen(text);
	while (left && to < end) {
		size_t n = character((const unsigned char *)text, left);
		to = mempcpy(to, n ? text : "\xef\xbf\xbd", n ? n : 3); /* U+FFFD for a damaged byte */
		text += n ? n : 1;
		left -= n ? n : 1;
	}
	*to = 0;
}

static void leave_message(const char *prefix, const char *separator, const char *format, va_list args)
{
	char text[MESSAGE_BYTES];
	int n = snprintf(text, sizeof text, "%s%s", prefix, separator);
	vsnprintf(text + n, sizeof text - (size_t)n, format, args);
	set_message(text);
}

int rb_fail(int status, const char *format, ...)
{
	va_list args;
	va_start(args, format);
	leave_message("", "", format, args);
	va_end(args);
	return status;
}

int rb_explain(int status, const char *format, ...)
{
	va_list args;
	va_start(args, format);
	leave_message(rb_status_text(status), ": ", format, args);
	va_end(args);
	return status;
}

int rb_say(int status)
{
	strcpy(message(), rb_status_text(status));
	return status;
}

int rb_missing(void) { return rb_explain(RB_ERR_INVALID, "a pointer that this function needs is NULL"); }

int rb_check_flags(uint32_t flags, uint32_t all)
{
	return flags & ~all ? rb_explain(RB_ERR_INVALID, "flags %#x", flags & ~all) : RB_OK;
}

int rb_copy_options(void *options, const void *given, uint32_t bytes)
{
	uint32_t size = given ? *(const uint32_t *)given : 0;
	memset(options, 0, bytes);
	if (given && (size < sizeof size || size > MOST_OPTIONS))
		return rb_explain(RB_ERR_VERSION, "a struct of options has size %u: set it to sizeof", size);
	for (uint32_t i = bytes; i < size; i++)
		if (((const uint8_t *)given)[i])
			return rb_explain(RB_ERR_VERSION, "an option beyond the %u bytes that this library knows is set", bytes);
	if (given)
		memcpy(options, given, size < bytes ? size : bytes);
	return RB_OK;
}

int rb_give_device(rb_device *to, const rb_device *from)
{
	uint32_t size = to->size;
	if (size < sizeof size || size > MOST_OPTIONS)
		return rb_explain(RB_ERR_VERSION, "rb_device.size is %u: set it to sizeof", size);
	memset(to, 0, size);
	memcpy(to, from, size < sizeof *from ? size : sizeof *from);
	to->size = size;
	return RB_OK;
}

int rb_abi_version(void) { return RB_ABI_VERSION; }
